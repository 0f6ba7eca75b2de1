// The three puzzles: they ask docs/puzzle_*.py, whose answers they draw.
"use strict";

const LIMIT = 5000; // milliseconds that a reader's function may take

/** What this browser keeps: {puzzle: {code, mark}}, and the best schedules of each hole. */
const kept = {
  read: (name) => {
    try {
      return JSON.parse(localStorage.getItem(`minidist.${name}`)) ?? {};
    } catch {
      return {};
    }
  },
  write: (name, value) => {
    try {
      localStorage.setItem(`minidist.${name}`, JSON.stringify(value));
    } catch {
      // a browser that keeps nothing still shows the puzzles
    }
  },
};

/** A form of the page: its fields, and its parts by class. */
function formOf(id) {
  const form = document.getElementById(id);
  form.addEventListener("submit", (event) => event.preventDefault());
  return { form, fields: form.elements, part: (name) => form.querySelector(`.${name}`) };
}

/** Show a verdict: an error, or whether a goal is reached. */
function say(part, text, wrong) {
  part("verdict").hidden = false;
  part("verdict").classList.toggle("wrong", wrong);
  part("verdict").textContent = text;
}

/** Fill a select with names and titles, those in `marks` with a tick. */
function options(select, titles, marks) {
  const chosen = select.value;
  const made = Object.entries(titles).map(([name, title], i) => {
    const tick = { par: " ✓✓", right: " ✓" }[marks[name]] ?? "";
    return new Option(`${i + 1}: ${title}${tick}`, name);
  });
  select.replaceChildren(...made);
  if (chosen) select.value = chosen;
}

// Write a collective.

async function collectives() {
  const { form, fields, part } = formOf("collectives-form");
  const puzzles = await askPython("puzzle_collectives", "choices");
  const titles = Object.fromEntries(Object.entries(puzzles).map(([name, { title }]) => [name, title]));
  let done = kept.read("collectives");
  const ticks = () => Object.fromEntries(Object.entries(done).map(([name, { mark }]) => [name, mark]));

  function choose() {
    const puzzle = puzzles[fields.puzzle.value];
    part("task").textContent = `${puzzle.task} Par: ${puzzle.formula}.`;
    fields.code.value = done[fields.puzzle.value]?.code ?? puzzle.stub;
    for (const name of ["verdict", "messages", "printed"]) part(name).hidden = true;
    part("results").replaceChildren();
  }

  function keep(mark) {
    const name = fields.puzzle.value;
    done = { ...kept.read("collectives"), [name]: { code: fields.code.value, mark } };
    kept.write("collectives", done);
    options(fields.puzzle, titles, ticks());
  }

  const run = latest(async () => {
    say(part, "Running.", false);
    const asked = { puzzle: fields.puzzle.value, code: fields.code.value };
    await askPython("puzzle_collectives", "choices"); // Python may have to start anew
    const timer = setTimeout(() => stopPython("stopped"), LIMIT);
    let found;
    try {
      found = await askPython("puzzle_collectives", "answer", asked);
    } catch (error) {
      const stopped = `It had not ended after ${LIMIT / 1000} s and was stopped. Does a loop never end?`;
      found = { error: error.message === "stopped" ? stopped : error.message };
    }
    clearTimeout(timer);
    if (asked.puzzle !== fields.puzzle.value) return;
    say(part, found.error ?? found.verdict, "error" in found);
    const atPar = !found.error && found.scores.every(([, own, par]) => own <= par);
    keep(found.error ? done[asked.puzzle]?.mark : atPar ? "par" : "right");
    const rows = (found.scores ?? []).map(([what, own, par, where]) => [what, own, par, where]);
    part("results").replaceChildren(...(rows.length ? [tableOf(["Count", "Yours", "Par", "On"], rows)] : []));
    part("printed").hidden = !found.printed;
    part("printed").textContent = found.printed ?? "";
    part("messages").hidden = !found.picture;
    if (found.picture) part("messages").innerHTML = messagesOf(found.picture);
  });

  fields.puzzle.addEventListener("change", choose);
  fields.code.addEventListener("input", () => {
    done = { ...done, [fields.puzzle.value]: { ...done[fields.puzzle.value], code: fields.code.value } };
    kept.write("collectives", done);
  });
  fields.code.addEventListener("keydown", (event) => {
    if (event.key !== "Enter") return;
    event.preventDefault();
    if (event.ctrlKey || event.metaKey) return run();
    const before = fields.code.value.slice(0, fields.code.selectionStart);
    const line = before.slice(before.lastIndexOf("\n") + 1);
    const indent = line.match(/^ */)[0] + (line.trimEnd().endsWith(":") ? "    " : "");
    document.execCommand("insertText", false, `\n${indent}`); // so that the browser can undo it
  });
  form.addEventListener("submit", run);
  fields.again.addEventListener("click", () => {
    fields.code.value = puzzles[fields.puzzle.value].stub;
    fields.code.dispatchEvent(new Event("input"));
    fields.code.focus();
  });
  fields.share.addEventListener("click", () =>
    shareLink("collective", { puzzle: fields.puzzle.value, code: fields.code.value }, part("shared")),
  );
  options(fields.puzzle, titles, ticks());
  const shared = sharedState("collective");
  if (shared?.puzzle in puzzles) fields.puzzle.value = shared.puzzle;
  choose();
  if (shared?.code) fields.code.value = shared.code;
  form.hidden = false;
  if (shared) form.scrollIntoView();
}

/** The messages of a case as SVG: a line for each rank, an arrow for each message, and who waits for whom. */
function messagesOf({ ranks, elements, arrows, waiting }) {
  const shown = arrows.filter(([sender, receiver, , start, stop]) => sender !== receiver && stop > start);
  const column = 92;
  const high = 46;
  const left = 52;
  const free = Array(ranks).fill(0); // when each rank's last message had been taken
  for (const [sender, receiver, begins] of shown) {
    for (const rank of [sender, receiver]) free[rank] = Math.max(free[rank], begins + 1);
  }
  const stuck = Object.entries(waiting);
  const rounds = Math.max(1, ...free) + (stuck.length ? 1.6 : 0);
  const width = left + rounds * column + 24;
  const at = (round, rank) => [left + round * column, 22 + rank * high];
  const made = [];
  for (let rank = 0; rank < ranks; rank++) {
    const [x, y] = at(0, rank);
    made.push(`<line x1="${x}" x2="${width - 10}" y1="${y}" y2="${y}"/><text x="0" y="${y + 4}">rank ${rank}</text>`);
  }
  for (const [sender, receiver, begins, start, stop, reduce] of shown) {
    const [x1, y1] = at(begins + 0.04, sender);
    const [x2, y2] = at(begins + 0.96, receiver);
    const share = Math.abs(receiver - sender) > 1 ? 0.14 : 0.3; // so that labels lie apart
    const kind = reduce ? "adds" : "stores";
    made.push(
      `<path class="arrow ${kind}" d="M${x1} ${y1}L${x2} ${y2}" marker-end="url(#${kind}-arrow)"/>` +
        `<text class="label" x="${x1 + share * (x2 - x1)}" y="${y1 + share * (y2 - y1) + 3}">${start}:${stop}</text>`,
    );
  }
  for (const [rank, peers] of stuck) {
    for (const [i, peer] of [...new Set(peers)].entries()) {
      const [x, y] = at(free[rank] + 0.15 + 0.12 * rank + 0.05 * i, Number(rank));
      const [, to] = at(0, peer);
      made.push(`<path class="arrow" d="M${x} ${y}V${to + (to > y ? -3 : 3)}" marker-end="url(#waits-arrow)"/>`);
    }
    const [x, y] = at(free[rank] + 0.2 + 0.12 * rank, Number(rank));
    made.push(`<text class="word" x="${x + 4}" y="${y - 5}">waits for rank ${[...new Set(peers)].join(", ")}</text>`);
  }
  const markers = [["adds", "#0072b2"], ["stores", "#d55e00"], ["waits", "#d55e00"]].map(
    ([name, fill]) =>
      `<marker id="${name}-arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">` +
      `<path d="M0 0L8 4L0 8z" fill="${fill}"/></marker>`,
  );
  const words =
    `${ranks} ranks, ${elements} elements; blue arrows add, orange ones store. ` +
    shown.map(([from, to, begins, a, b]) => `Round ${begins}: ${a}:${b} from rank ${from} to ${to}.`).join(" ");
  return (
    `<svg role="img" aria-label="${words}" style="width: ${width}px; height: ${24 + ranks * high}px">` +
    `${markers.join("")}${made.join("")}<text x="0" y="${20 + ranks * high}">${ranks} ranks, ${elements} elements: ` +
    `blue adds, orange stores</text></svg>`
  );
}

// Schedule golf.

async function golf() {
  const { form, fields, part } = formOf("golf-form");
  const [holes, { passes }] = await Promise.all([
    askPython("puzzle_schedules", "choices"),
    askPython("playground", "choices"),
  ]);
  const titles = Object.fromEntries(Object.entries(holes).map(([name, { title }]) => [name, title]));
  const past = []; // texts, for undo
  let chosen = { rank: 0, index: 0 };
  let focused = false;
  let given = ""; // a text that was shown to the reader, and is nobody's score

  /** The text's first line with stages, if any, and the words of each rank. */
  function parsed() {
    const lines = fields.text.value.trim().split("\n");
    const first = /^stages/i.test(lines[0]) ? [lines.shift()] : [];
    return { first, rows: lines.map((line) => line.split(/[\s,;]+/).filter(Boolean)) };
  }

  function write({ first, rows }) {
    past.push(fields.text.value);
    fields.text.value = [...first, ...rows.map((row) => row.join(" "))].join("\n");
    return update();
  }

  /** Move the chosen pass by so many places in its row. */
  function move(by) {
    const text = parsed();
    const row = text.rows[chosen.rank];
    const to = Math.min(Math.max(chosen.index + by, 0), row.length - 1);
    if (to === chosen.index) return;
    row.splice(to, 0, ...row.splice(chosen.index, 1));
    chosen.index = to;
    write(text);
  }

  const update = latest(async () => {
    const hole = fields.hole.value;
    const text = fields.text.value;
    const found = await askPython("puzzle_schedules", "answer", { hole, text });
    if (text !== fields.text.value || hole !== fields.hole.value) return;
    say(part, found.error ?? found.verdict, "error" in found || !found.fits);
    fields.text.rows = 2 + text.split("\n").length;
    draw(found);
    if (found.fits && text !== given) remember(hole, text, found.score);
    table(found);
  });

  /** The chart, and above each pass a button that can be dragged. */
  function draw(found) {
    const { rows } = parsed();
    const words = rows.map((row) => row.map((word) => word.match(/^([fbiw])(\d+)(?:\.(\d+))?$/i)));
    const plain = words.every((row) => row.every(Boolean));
    for (const name of ["earlier", "later"]) fields[name].disabled = !plain;
    const chunks = 1 + Math.max(0, ...words.flat().map((word) => Number(word?.[3] ?? 0)));
    const sizes = [rows.length, 0, chunks];
    const ordered = words.map((row) =>
      row.map((word, i) => [(word?.[1] ?? "F").toUpperCase(), Number(word?.[2]), Number(word?.[3] ?? 0), i, i + 1]),
    );
    const shown = found.timeline ? found : { timeline: plain ? ordered : rows.map(() => []), sizes };
    const scroll = part("scroll");
    const left = scroll.scrollLeft;
    const least = 24 * (found.timeline ? shown.sizes[2] : 1);
    const scale = drawChart(form, shown, { passes, label: part("verdict").textContent, least });
    if (!plain) return;
    const overlay = element("div", { className: "passes" });
    rows.forEach((row, rank) => {
      let x = 0;
      row.forEach((word, index) => {
        const event = shown.timeline[rank][index];
        const wide = event ? (event[4] - event[3]) * scale : 24;
        x = event ? event[3] * scale : Math.max(x, 44 + (shown.timeline[rank].at(-1)?.[4] ?? 0) * scale);
        const when = event && found.timeline ? `, ${seconds(event[3])} to ${seconds(event[4])}` : ", not run";
        const button = element("button", { type: "button", className: event ? "" : "never" });
        button.style.cssText = `left: ${x}px; top: ${rank * ROW + 1}px; width: ${wide}px; height: ${ROW - 2}px`;
        button.setAttribute("aria-label", `${word} on rank ${rank}, ${index + 1} of ${row.length}${when}`);
        if (!event) button.textContent = word;
        const current = rank === chosen.rank && index === chosen.index;
        button.tabIndex = current ? 0 : -1;
        button.classList.toggle("current", current);
        Object.assign(button.dataset, { rank, index });
        overlay.append(button);
        x += wide;
      });
    });
    scroll.append(overlay);
    scroll.scrollLeft = left;
    if (focused) choose(chosen.rank, chosen.index);
  }

  const buttonAt = (rank, index) => form.querySelector(`.passes [data-rank="${rank}"][data-index="${index}"]`);

  function choose(rank, index, focus = true) {
    const to = buttonAt(rank, index);
    if (!to) return;
    const from = form.querySelector(".passes .current");
    if (from) Object.assign(from, { tabIndex: -1 }).classList.remove("current");
    chosen = { rank, index };
    to.tabIndex = 0;
    to.classList.add("current");
    part("pointed").textContent = to.getAttribute("aria-label");
    if (focus) to.focus();
  }

  part("scroll").addEventListener("focusin", ({ target: { dataset } }) => {
    focused = true;
    if (dataset.rank) choose(Number(dataset.rank), Number(dataset.index), false);
  });
  part("scroll").addEventListener("focusout", ({ relatedTarget }) => (focused = relatedTarget === null && focused));
  fields.text.addEventListener("focus", () => (focused = false));
  part("scroll").addEventListener("keydown", (event) => {
    const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (!step || !event.target.dataset.rank) return;
    event.preventDefault();
    if (event.shiftKey && step[1]) return move(step[1]);
    const row = parsed().rows[chosen.rank + step[0]];
    if (row) choose(chosen.rank + step[0], Math.min(Math.max(chosen.index + step[1], 0), row.length - 1));
  });
  part("scroll").addEventListener("pointerdown", (down) => {
    if (!down.target.dataset.rank || down.pointerType === "touch") return;
    const button = down.target;
    const rank = Number(button.dataset.rank);
    choose(rank, Number(button.dataset.index));
    button.setPointerCapture(down.pointerId);
    button.classList.add("dragged");
    button.onpointermove = ({ clientX }) => (button.style.transform = `translateX(${clientX - down.clientX}px)`);
    button.onpointerup = ({ clientX }) => {
      button.onpointermove = button.onpointerup = null;
      button.classList.remove("dragged");
      button.style.transform = "";
      const by = clientX - down.clientX;
      if (Math.abs(by) < 6) return;
      const middle = (each) => each.offsetLeft + each.offsetWidth / 2;
      const others = [...form.querySelectorAll(`.passes [data-rank="${rank}"]`)].filter((each) => each !== button);
      const to = others.filter((each) => middle(each) < middle(button) + by).length;
      move(to - chosen.index);
    };
  });
  part("scroll").addEventListener("click", ({ target }) => {
    if (target.dataset.rank) choose(Number(target.dataset.rank), Number(target.dataset.index));
  });

  function remember(hole, text, [took, bubble, held]) {
    const all = kept.read("golf");
    const best = (all[hole] ?? []).filter((each) => each.text !== text);
    best.push({ text, took, bubble, held });
    best.sort((a, b) => a.took - b.took || a.held - b.held);
    kept.write("golf", { ...all, [hole]: best.slice(0, 5) });
  }

  /** How much each rank waits and holds; the marks, and the best schedules that this browser keeps. */
  function table(found) {
    const { budget, marks } = holes[fields.hole.value];
    const mine = (kept.read("golf")[fields.hole.value] ?? []).map((each, i) => [
      i ? "yours" : "your best", each.took, each.bubble, each.held, each.text,
    ]);
    const all = [...marks, ...mine].sort((a, b) => a[1] - b[1] || a[3] - b[3]);
    const rows = all.map(([title, took, bubble, held, text]) => {
      const button = element("button", { type: "button", textContent: "Show" });
      button.setAttribute("aria-label", `Show ${title}, ${took} s`);
      button.addEventListener("click", () => {
        past.push(fields.text.value);
        fields.text.value = given = text;
        chosen = { rank: 0, index: 0 };
        update();
      });
      return [title, seconds(took), percent(bubble), `${held}${held > budget ? ", over the budget" : ""}`, button];
    });
    const titles = ["Schedule", "Takes", "Ranks wait", "Fullest holds", ""];
    const tables = [tableOf(titles, rows)];
    if (found.bubbles) {
      const chunks = found.sizes[2];
      const own = found.bubbles.map((each, i) => [i, percent(each), found.peak_activations[i] / chunks]);
      tables.unshift(tableOf(["Rank", "Waits", `Holds, of ${budget}`], own));
    }
    part("results").replaceChildren(...tables);
  }

  function start() {
    const { story, marks } = holes[fields.hole.value];
    part("task").textContent = story;
    fields.text.value = given = marks.find(([title]) => title === "1F1B")[4];
    chosen = { rank: 0, index: 0 };
    past.length = 0;
    return update();
  }

  fields.hole.addEventListener("change", start);
  fields.text.addEventListener("input", update);
  fields.earlier.addEventListener("click", () => move(-1));
  fields.later.addEventListener("click", () => move(1));
  fields.split.addEventListener("click", () => {
    const text = parsed();
    text.rows = text.rows.map((row) => row.flatMap((word) => (/^b/i.test(word) ? [`I${word.slice(1)}`, `W${word.slice(1)}`] : [word])));
    write(text);
  });
  fields.undo.addEventListener("click", () => {
    if (past.length) fields.text.value = past.pop();
    update();
  });
  fields.share.addEventListener("click", () =>
    shareLink("golf", { hole: fields.hole.value, text: fields.text.value }, part("shared")),
  );
  options(fields.hole, titles, {});
  const shared = sharedState("golf");
  if (shared?.hole in holes) fields.hole.value = shared.hole;
  form.hidden = false;
  part("task").textContent = holes[fields.hole.value].story;
  fields.text.value = given = shared?.text ?? holes[fields.hole.value].marks[1][4];
  await update();
  if (shared) form.scrollIntoView();
}

// Who holds what.

async function residency() {
  const { form, fields, part } = formOf("residency-form");
  const { rooms, sets, columns } = await askPython("puzzle_residency", "choices");
  const titles = Object.fromEntries(Object.entries(rooms).map(([name, { title }]) => [name, title]));
  const cells = sets.map((set) =>
    Object.entries(columns).map(([column, title]) => {
      const select = element("select", {}, new Option("?", ""), new Option("whole", "whole"), new Option("1/n", "share"));
      select.setAttribute("aria-label", `${title} of ${set}`);
      select.dataset.column = column;
      return select;
    }),
  );
  const sent = sets.map(() => labelled(""));
  part("cells").append(
    tableOf(["Of", ...Object.values(columns), "Sent in a step"], sets.map((set, i) => [set, ...cells[i], sent[i]])),
  );

  const update = latest(async () => {
    const { value: room } = fields.room;
    const table = cells.map((row) =>
      Object.fromEntries(row.map(({ dataset, value }) => [dataset.column, value ? value === "whole" : null])),
    );
    const found = await askPython("puzzle_residency", "answer", { room, table });
    if (room !== fields.room.value) return;
    say(part, found.error ?? found.verdict, "error" in found || !found.solved);
    sent.forEach((each, i) => (each.textContent = found.sent?.[i] ?? ""));
    part("results").replaceChildren(...(found.rows ? [tableOf(["On a rank", "Bytes"], found.rows)] : []));
    if (!found.solved) return;
    const done = kept.read("residency");
    if (found.least || !done[room]) kept.write("residency", { ...done, [room]: found.least ? "par" : "right" });
    options(fields.room, titles, kept.read("residency"));
  });

  function choose() {
    part("task").textContent = rooms[fields.room.value].story;
    return update();
  }

  fields.room.addEventListener("change", choose);
  part("cells").addEventListener("change", update);
  fields.share.addEventListener("click", () => {
    const table = cells.map((row) => row.map(({ value }) => value));
    shareLink("residency", { room: fields.room.value, table }, part("shared"));
  });
  options(fields.room, titles, kept.read("residency"));
  const shared = sharedState("residency");
  if (shared?.room in rooms) fields.room.value = shared.room;
  shared?.table?.forEach((row, i) => row.forEach((value, j) => cells[i]?.[j] && (cells[i][j].value = value)));
  form.hidden = false;
  await choose();
  if (shared) form.scrollIntoView();
}

(async () => {
  const waiting = document.querySelector(".python-status");
  try {
    await Promise.all([collectives(), golf(), residency()]);
    waiting.remove();
    window.puzzlesReady = true; // for tests
  } catch (error) {
    waiting.textContent = `Python does not start in this browser: ${error}`;
  }
})();
