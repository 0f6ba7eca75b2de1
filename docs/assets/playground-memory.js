// The playground's part about memory: asks docs/playground_memory.py, and draws a bar for each ZeRO stage.
"use strict";

(async () => {
  const form = document.getElementById("memory-form");
  const part = (name) => form.querySelector(`.${name}`);
  const fields = form.elements;
  const powers = ["dp", "tp", "pp"]; // whose sliders count doublings
  const number = (name) => (powers.includes(name) ? 2 ** fields[name].value : Number(fields[name].value));
  let choices;
  try {
    choices = await askPython("playground_memory", "choices");
  } catch {
    return; // the other part says that Python does not start
  }
  const answer = (request) => askPython("playground_memory", "answer", request);

  /** Ask about the form's layout, and show the answer. */
  const update = latest(async () => {
    const pipeline = number("pp") > 1;
    const schedule = pipeline ? fields.schedule.value : "1f1b";
    const layout = { schedule, chunks: choices.schedules[schedule][1] };
    layout.recompute = fields.recompute.value || false;
    layout.precision = fields.precision.value;
    for (const name of [...powers, "zero", "micro_batches"]) layout[name] = number(name);
    const asked = { model: fields.model.value, memory: fields.memory.value, layout };
    for (const name of ["rows", "tokens"]) asked[name] = number(name);
    const found = await answer(asked);
    fields.schedule.disabled = !pipeline;
    for (const slider of form.querySelectorAll("input[type=range]")) {
      slider.parentElement.querySelector("output").textContent = number(slider.name);
      slider.setAttribute("aria-valuetext", number(slider.name));
    }
    const wrong = "error" in found || found.stages[layout.zero].peak[0] > found.budget;
    part("verdict").classList.toggle("wrong", wrong);
    part("verdict").textContent = found.error ?? summary(found, layout, asked);
    for (const name of ["bars", "legend", "results"]) part(name).hidden = "error" in found;
    if (!found.error) show(found, layout.zero);
  });

  function summary(found, layout, asked) {
    const [peak, text] = found.stages[layout.zero].peak;
    const most =
      found.rows === 0
        ? "Not even one row fits."
        : `At most ${found.rows.toLocaleString("en")} rows of ${asked.tokens} tokens fit on a data-parallel rank, ` +
          `${(found.rows * layout.dp).toLocaleString("en")} in a batch.`;
    const fits = peak <= found.budget ? "fits in" : "does not fit in";
    return `Layout ${found.layout}: the fullest rank needs ${text}, which ${fits} ${asked.memory}. ${most}`;
  }

  /** Bars of all stages on one scale, with a line at the rank's memory; figures of the chosen stage. */
  function show(found, zero) {
    const colors = { ...choices.colors, temporary: "#999999" };
    const longest = Math.max(...Object.values(found.stages).map((stage) => stage.peak[0]));
    const whole = Math.max(longest, Math.min(found.budget, 2 * longest)) * 1.01;
    const rows = Object.entries(found.stages).map(([stage, parts]) => {
      const row = labelled("");
      row.className = Number(stage) === zero ? "bar chosen" : "bar";
      const bar = labelled("");
      bar.className = "track";
      bar.style.setProperty("--budget", `${(100 * found.budget) / whole}%`);
      for (const [name, color] of Object.entries(colors)) {
        const [bytes, text] = parts[name];
        const box = labelled("");
        box.style.cssText = `width: ${(100 * bytes) / whole}%; background: ${color}`;
        box.title = `${name}: ${text}`;
        bar.append(box);
      }
      row.append(labelled(stage === "0" ? "no ZeRO" : `ZeRO-${stage}`), bar, labelled(parts.peak[1]));
      return row;
    });
    part("bars").replaceChildren(...rows);
    const keys = Object.entries(colors).map(([name, color]) => {
      const key = labelled(name);
      key.style.setProperty("--key", color);
      return key;
    });
    part("legend").replaceChildren(...keys);
    const chosen = Object.entries(found.stages[zero]);
    const figures = chosen.map(([name, [bytes, text]]) => [name, text, bytes.toLocaleString("en")]);
    part("results").replaceChildren(tableOf(["On the fullest rank", "", "Bytes"], figures));
  }

  for (const [name, [title]] of Object.entries(choices.models)) fields.model.append(new Option(title, name));
  fields.zero.max = Math.max(...choices.stages);
  for (const name of choices.precisions) fields.precision.append(new Option(name));
  for (const [name, [title]] of Object.entries(choices.schedules)) fields.schedule.append(new Option(title, name));
  fields.recompute.append(new Option("nothing", ""), ...choices.policies.map((name) => new Option(name)));
  fields.model.value = "gpt2-xl";
  fields.recompute.value = "every layer";
  fields.precision.value = "bf16";
  fields.schedule.value = "1f1b";
  for (const [name, value] of Object.entries(sharedState("layout") ?? {})) fields[name].value = value;
  fields.share.addEventListener("click", () => {
    const state = Object.fromEntries([...new FormData(form)]);
    shareLink("layout", { ...state, schedule: fields.schedule.value }, part("shared"));
  });
  form.addEventListener("input", ({ target }) => {
    if (target.name === "model") {
      const context = choices.models[target.value][1];
      fields.tokens.max = context;
      fields.tokens.value = context;
    }
    update();
  });
  form.addEventListener("submit", (event) => event.preventDefault());
  form.hidden = false;
  await update();
  window.playgroundMemory = answer; // for the console, and for tests
})();
