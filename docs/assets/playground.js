// The playground's part about schedules: asks docs/playground.py, and draws the answers.
"use strict";

const form = document.getElementById("playground-form");
const part = (name) => form.querySelector(`.${name}`);
const verdict = part("verdict");
const rowHeight = 30;
let python, choices, shown;

/** What docs/playground.py answers, as an object. */
function answer(request) {
  return JSON.parse(python.answer(JSON.stringify(request)));
}

/** Ask about the form's schedule, and show the answer. Without a name the schedule is what the text says. */
function update(rewrite = false) {
  const number = (name) => Number(form.elements[name].value);
  const own = !form.elements.schedule.value;
  const times = {};
  for (const name of ["forward", "backward_input", "backward_weight", "message"]) times[name] = number(name);
  const found = answer({
    schedule: form.elements.schedule.value,
    ranks: number("ranks"),
    micro_batches: number("micro_batches"),
    chunks: number("chunks"),
    times,
    text: form.elements.text.value,
    messages: form.elements.messages.checked,
    rewrite,
  });
  for (const name of ["ranks", "micro_batches", "chunks"]) form.elements[name].disabled = own;
  if (own && found.sizes) {
    ["ranks", "micro_batches", "chunks"].forEach((name, i) => {
      const slider = form.elements[name];
      slider.max = Math.max(slider.max, found.sizes[i]);
      slider.value = found.sizes[i];
    });
  }
  for (const slider of form.querySelectorAll("label input[type=range]")) {
    const output = slider.parentElement.querySelector("output");
    if (output) output.textContent = slider.value;
  }
  const text = form.elements.text;
  if (text.value !== found.text) text.value = found.text; // else the cursor would jump
  text.rows = 1 + found.text.split("\n").length;
  shown = found;
  verdict.classList.toggle("wrong", "error" in found);
  verdict.textContent = found.error ?? summary(found);
  for (const name of ["chart", "pointed", "legend", "results"]) part(name).hidden = "error" in found;
  if (!found.error) {
    draw();
    tabulate(found);
  }
}

const percent = (share) => `${(100 * share).toFixed(1)} %`;
const seconds = (time) => `${Number(time.toFixed(3))} s`;

function summary(found) {
  const peak = Math.max(...found.peak_activations);
  const unit = found.sizes[2] > 1 ? "passes through a chunk" : "micro-batches";
  return (
    `The schedule is complete, and never stuck. It takes ${seconds(found.seconds)}; ranks wait for ` +
    `${percent(found.bubble)} of the time; the fullest rank holds ${peak} ${unit}.`
  );
}

/** The colour of a pass: the first of several chunks is pale, the last is strong. */
function color(short, chunk, chunks) {
  const strength = chunks === 1 ? 1 : 0.45 + (0.55 * chunk) / (chunks - 1);
  const own = choices.passes.find((each) => each[0] === short)[2];
  return `color-mix(in srgb, ${own} ${100 * strength}%, white)`;
}

/** A rank's row of the chart, as text. The passes of one colour are one path: a browser lays out thousands slowly. */
function row(events, rank, scale, total, chunks) {
  const y = rank * rowHeight + 1;
  const tall = rowHeight - 2;
  const paths = {};
  let micros = "";
  for (const [short, micro, chunk, from, to] of events) {
    const x = from * scale;
    const wide = (to - from) * scale;
    paths[[short, chunk]] = `${paths[[short, chunk]] ?? ""}M${x} ${y}h${wide}v${tall}h${-wide}z`;
    if (wide >= 1 + 5.6 * String(micro).length) {
      micros += `<text x="${x + wide / 2}" y="${y + rowHeight / 2 + 3}" class="micro">${micro}</text>`;
    }
  }
  const passes = Object.entries(paths).map(([key, path]) => {
    const [short, chunk] = key.split(",");
    return `<path class="pass" fill="${color(short, chunk, chunks)}" d="${path}"/>`;
  });
  const behind = `<rect class="row" x="0" y="${y}" width="${total * scale}" height="${tall}"/>`;
  return behind + passes.join("") + micros;
}

/** Say which pass is at this place of the chart. */
function point({ clientX, clientY }) {
  const { left, top } = part("scroll").firstChild.getBoundingClientRect();
  const rank = Math.floor((clientY - top) / rowHeight);
  const time = (clientX - left) / shown.scale;
  const found = shown.timeline[rank]?.find(([, , , from, to]) => from <= time && time < to);
  if (!found) return;
  const [short, micro, chunk, from, to] = found;
  const which = `${short}${micro}${chunk ? `.${chunk}` : ""}`;
  part("pointed").textContent = `${which} on rank ${rank}, ${seconds(from)} to ${seconds(to)}`;
}

/** The Gantt chart: a row for each rank, a box for each pass, an axis of seconds. */
function draw() {
  const { timeline, sizes, seconds: total } = shown;
  const [ranks, , chunks] = sizes;
  const scroll = part("scroll");
  const width = Math.max(60, scroll.clientWidth - 2) * Number(form.elements.zoom.value);
  const height = ranks * rowHeight;
  const scale = (width - 12) / (total || 1);
  shown.scale = scale;
  const made = timeline.map((events, rank) => row(events, rank, scale, total, chunks));
  const step = [1, 2, 5].flatMap((n) => [0.1, 1, 10, 100].map((ten) => n * ten)).sort((a, b) => a - b);
  const apart = step.find((each) => each * scale >= 45) ?? 1000;
  for (let time = 0; time <= total + 1e-9; time += apart) {
    const x = time * scale;
    made.push(
      `<line x1="${x}" x2="${x}" y1="${height}" y2="${height + 5}"/>` +
        `<text x="${x}" y="${height + 18}" text-anchor="${time ? "middle" : "start"}">${Number(time.toFixed(3))}</text>`,
    );
  }
  const size = `width: ${width}px; height: ${height + 22}px`;
  scroll.innerHTML = `<svg role="img" aria-label="${summary(shown)}" style="${size}">${made.join("")}</svg>`;
  part("ranks").replaceChildren(...timeline.map((_, rank) => labelled(`rank ${rank}`)));
  const drawn = new Set(timeline.flat().map((event) => event[0]));
  part("legend").replaceChildren(
    ...choices.passes.filter(([short]) => drawn.has(short)).map(([short, label]) => {
      const key = labelled(`${short}: ${label}`);
      key.style.setProperty("--key", color(short, chunks - 1, chunks));
      return key;
    }),
  );
}

/** A table: how long each rank waits, and how much it holds. */
function tabulate(found) {
  const rows = found.bubbles.map((bubble, rank) => [rank, percent(bubble), found.peak_activations[rank]]);
  part("results").replaceChildren(tableOf(["Rank", "Waits", "Holds at most"], rows));
}

/** Update at every event of the form. An edit of the text makes the schedule one's own. */
function listen() {
  form.addEventListener("input", ({ target }) => {
    if (target.name === "zoom") {
      if (!shown.error) draw();
      return;
    }
    if (target.name === "text") form.elements.schedule.value = "";
    if (target.name === "schedule" && target.value) {
      form.elements.chunks.value = choices.schedules[target.value][1];
    }
    update(target.name === "messages");
  });
  form.addEventListener("submit", (event) => event.preventDefault());
  for (const type of ["pointermove", "click"]) part("scroll").addEventListener(type, point);
  for (const button of document.querySelectorAll("button[data-schedule]")) {
    button.addEventListener("click", () => {
      form.elements.schedule.value = "";
      form.elements.text.value = button.dataset.schedule;
      update();
      form.scrollIntoView({ block: "start" });
    });
  }
  window.addEventListener("resize", () => shown.error || draw());
}

(async () => {
  const waiting = document.getElementById("playground-status");
  try {
    python = (await playgroundPython)("playground");
  } catch (error) {
    waiting.textContent = `Python does not start in this browser: ${error}`;
    return;
  }
  choices = JSON.parse(python.choices());
  const select = form.elements.schedule;
  for (const [name, [title]] of Object.entries(choices.schedules)) select.append(new Option(title, name));
  select.append(new Option("your own", ""));
  select.value = "1f1b";
  waiting.remove();
  form.hidden = false;
  listen();
  update();
  window.playgroundAnswer = answer; // for the console, and for tests
})();
