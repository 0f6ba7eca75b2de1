// The playground: asks docs/playground.py, which runs in this page by Pyodide, and draws the answers.
//
// A page that is a file may not fetch other files. So `make site` puts Pyodide, Python's standard library and the
// library's sources into playground-python.js, as the base64 of their gzip (EMBEDDED), and each becomes a blob.
"use strict";

const form = document.getElementById("playground-form");
const part = (name) => form.querySelector(`.${name}`);
const verdict = part("verdict");
const svgNames = "http://www.w3.org/2000/svg";
const rowHeight = 30;
let python, choices, shown;

/** A file of EMBEDDED as a blob. */
async function unpacked(name, type) {
  const packed = await fetch(`data:application/gzip;base64,${EMBEDDED[name]}`);
  const stream = packed.body.pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream, { headers: { "Content-Type": type } }).blob();
}

/** Start Python and give it the library's sources. */
async function start() {
  const [script, wasm, library, lock, sources] = await Promise.all([
    unpacked("pyodide.asm.mjs", "text/javascript"),
    unpacked("pyodide.asm.wasm", "application/wasm"),
    unpacked("python_stdlib.zip", "application/zip"),
    unpacked("pyodide-lock.json", "application/json"),
    unpacked("sources.json", "application/json"),
  ]);
  const module = await import(URL.createObjectURL(script));
  const pyodide = await loadPyodide({
    createPyodideModule: module.default,
    indexURL: `${URL.createObjectURL(wasm)}#`, // the one file fetched from this "folder" is the wasm
    stdLibURL: URL.createObjectURL(library),
    lockFileContents: JSON.parse(await lock.text()),
    packageBaseUrl: "about:blank", // no package is ever loaded
  });
  for (const [path, text] of Object.entries(JSON.parse(await sources.text()))) {
    pyodide.FS.mkdirTree(`/library/${path}`.replace(/\/[^/]*$/, ""));
    pyodide.FS.writeFile(`/library/${path}`, text);
  }
  pyodide.runPython("import sys; sys.path.insert(0, '/library')");
  return pyodide.pyimport("playground");
}

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

function element(name, attributes, text) {
  const made = document.createElementNS(svgNames, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

/** The colour of a pass: the first of several chunks is pale, the last is strong. */
function color(short, chunk, chunks) {
  const strength = chunks === 1 ? 1 : 0.45 + (0.55 * chunk) / (chunks - 1);
  const own = choices.passes.find((each) => each[0] === short)[2];
  return `color-mix(in srgb, ${own} ${100 * strength}%, white)`;
}

/** The Gantt chart: a row for each rank, a box for each pass, an axis of seconds. */
function draw() {
  const { timeline, sizes, seconds: total } = shown;
  const [ranks, , chunks] = sizes;
  const scroll = part("scroll");
  const width = Math.max(60, scroll.clientWidth - 2) * Number(form.elements.zoom.value);
  const height = ranks * rowHeight;
  const scale = (width - 12) / (total || 1);
  const chart = element("svg", { role: "img", "aria-label": summary(shown) });
  chart.style.width = `${width}px`;
  chart.style.height = `${height + 22}px`;
  timeline.forEach((events, rank) => {
    const y = rank * rowHeight;
    chart.append(element("rect", { class: "row", x: 0, y: y + 1, width: total * scale, height: rowHeight - 2 }));
    for (const [short, micro, chunk, from, to] of events) {
      const x = from * scale;
      const wide = (to - from) * scale;
      const box = { class: "pass", x, y: y + 1, width: wide, height: rowHeight - 2, fill: color(short, chunk, chunks) };
      const which = `${short}${micro}${chunk ? `.${chunk}` : ""} on rank ${rank}, ${seconds(from)} to ${seconds(to)}`;
      chart.append(element("rect", { ...box, "data-which": which }));
      if (wide >= 1 + 5.6 * String(micro).length) {
        chart.append(element("text", { x: x + wide / 2, y: y + rowHeight / 2 + 4, class: "micro" }, micro));
      }
    }
  });
  const step = [1, 2, 5].flatMap((n) => [0.1, 1, 10, 100].map((ten) => n * ten)).sort((a, b) => a - b);
  const apart = step.find((each) => each * scale >= 45) ?? 1000;
  for (let time = 0; time <= total + 1e-9; time += apart) {
    const x = time * scale;
    chart.append(element("line", { x1: x, x2: x, y1: height, y2: height + 5 }));
    const anchor = time ? "middle" : "start";
    chart.append(element("text", { x, y: height + 18, "text-anchor": anchor }, Number(time.toFixed(3))));
  }
  scroll.replaceChildren(chart);
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

function labelled(text) {
  const made = document.createElement("span");
  made.textContent = text;
  return made;
}

/** A table: how long each rank waits, and how much it holds. */
function tabulate(found) {
  const table = document.createElement("table");
  const head = table.createTHead().insertRow();
  for (const title of ["Rank", "Waits", "Holds at most"]) {
    head.append(Object.assign(document.createElement("th"), { textContent: title, scope: "col" }));
  }
  const body = table.createTBody();
  found.bubbles.forEach((bubble, rank) => {
    const row = body.insertRow();
    for (const text of [rank, percent(bubble), found.peak_activations[rank]]) row.insertCell().textContent = text;
  });
  part("results").replaceChildren(table);
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
  for (const type of ["pointerover", "click"]) {
    part("scroll").addEventListener(type, ({ target }) => {
      if (target.dataset?.which) part("pointed").textContent = target.dataset.which;
    });
  }
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
    python = await start();
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
