// The playground's part about schedules: asks docs/playground.py, and draws the answers.
"use strict";

const form = document.getElementById("playground-form");
const part = (name) => form.querySelector(`.${name}`);
const verdict = part("verdict");
const fields = form.elements;
const sliders = ["ranks", "micro_batches", "chunks", "forward", "backward_input", "backward_weight", "message"];
let choices, shown;
let rewrite = false; // whether to write the text anew, with or without its messages

const answer = (request) => askPython("playground", "answer", request);

/** Ask about the form's schedule, and show the answer. Without a name the schedule is what the text says. */
const update = latest(async () => {
  const number = (name) => Number(fields[name].value);
  const own = !fields.schedule.value;
  const times = {};
  for (const name of sliders.slice(3)) times[name] = number(name);
  const asked = {
    schedule: fields.schedule.value,
    ranks: number("ranks"),
    micro_batches: number("micro_batches"),
    chunks: number("chunks"),
    times,
    text: fields.text.value,
    messages: fields.messages.checked,
    rewrite,
  };
  rewrite = false;
  const found = await answer(asked);
  for (const name of ["ranks", "micro_batches", "chunks"]) fields[name].disabled = own;
  if (own && found.sizes) {
    ["ranks", "micro_batches", "chunks"].forEach((name, i) => {
      fields[name].max = Math.max(fields[name].max, found.sizes[i]);
      fields[name].value = found.sizes[i];
    });
  }
  for (const name of sliders) fields[name].parentElement.querySelector("output").textContent = fields[name].value;
  // Else the cursor would jump, or what was typed meanwhile would go.
  if (fields.text.value !== found.text && fields.text.value === asked.text) fields.text.value = found.text;
  fields.text.rows = 1 + found.text.split("\n").length;
  shown = found;
  verdict.classList.toggle("wrong", "error" in found);
  verdict.textContent = found.error ?? summary(found);
  for (const name of ["chart", "pointed", "legend"]) part(name).hidden = !found.timeline;
  part("results").hidden = "error" in found;
  if (found.timeline) draw();
  if (!found.error) tabulate(found);
});

function summary(found) {
  const peak = Math.max(...found.peak_activations);
  const unit = found.sizes[2] > 1 ? "passes through a chunk" : "micro-batches";
  return (
    `The schedule is complete, and never stuck. It takes ${seconds(found.seconds)}; ranks wait for ` +
    `${percent(found.bubble)} of the time; the fullest rank holds ${peak} ${unit}.`
  );
}

function draw() {
  drawChart(form, shown, { passes: choices.passes, label: verdict.textContent, zoom: Number(fields.zoom.value) });
}

/** A table: how long each rank waits, and how much it holds. */
function tabulate(found) {
  const rows = found.bubbles.map((bubble, rank) => [rank, percent(bubble), found.peak_activations[rank]]);
  part("results").replaceChildren(tableOf(["Rank", "Waits", "Holds at most"], rows));
}

/** All that the form's answer depends on, for a link. */
function state() {
  const found = { schedule: fields.schedule.value, messages: fields.messages.checked };
  for (const name of sliders) found[name] = fields[name].value;
  if (!found.schedule) found.text = fields.text.value;
  return found;
}

function restore(found) {
  for (const [name, value] of Object.entries(found)) {
    if (name === "messages") fields.messages.checked = value;
    else if (fields[name]) fields[name].value = value;
  }
}

/** Update at every event of the form. An edit of the text makes the schedule one's own. */
function listen() {
  form.addEventListener("input", ({ target }) => {
    if (target.name === "zoom") {
      if (shown.timeline) draw();
      return;
    }
    if (target.name === "text") fields.schedule.value = "";
    if (target.name === "schedule" && target.value) {
      fields.chunks.value = choices.schedules[target.value][1];
    }
    rewrite ||= target.name === "messages";
    update();
  });
  form.addEventListener("submit", (event) => event.preventDefault());
  fields.share.addEventListener("click", () => shareLink("schedule", state(), part("shared")));
  for (const button of document.querySelectorAll("button[data-schedule]")) {
    button.addEventListener("click", () => {
      fields.schedule.value = "";
      fields.text.value = button.dataset.schedule;
      update();
      form.scrollIntoView({ block: "start" });
    });
  }
  window.addEventListener("resize", () => shown?.timeline && draw());
}

(async () => {
  const waiting = document.getElementById("playground-status");
  try {
    choices = await askPython("playground", "choices");
  } catch (error) {
    waiting.textContent = `Python does not start in this browser: ${error}`;
    return;
  }
  for (const [name, [title]] of Object.entries(choices.schedules)) fields.schedule.append(new Option(title, name));
  fields.schedule.append(new Option("your own", ""));
  fields.schedule.value = "1f1b";
  restore(sharedState("schedule") ?? {});
  waiting.remove();
  form.hidden = false;
  listen();
  await update();
  window.playgroundAnswer = answer; // for the console, and for tests
})();
