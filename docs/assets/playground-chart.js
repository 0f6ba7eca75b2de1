// The Gantt chart of a schedule, as docs/playground.py answers it: a row for each rank, a box for each pass, and where
// ranks wait for ever, an arrow to the rank that each waits for.
"use strict";

const ROW = 30; // pixels

const percent = (share) => `${(100 * share).toFixed(1)} %`;
const seconds = (time) => `${Number(time.toFixed(3))} s`;

/** The colour of a pass: the first of several chunks is pale, the last is strong. */
function colorOf(passes, short, chunk, chunks) {
  const strength = chunks === 1 ? 1 : 0.45 + (0.55 * chunk) / (chunks - 1);
  const own = passes.find((each) => each[0] === short)[2];
  return `color-mix(in srgb, ${own} ${100 * strength}%, white)`;
}

/** The name of a pass, as one writes it. */
const passName = ([short, micro, chunk]) => `${short}${micro}${chunk ? `.${chunk}` : ""}`;

/** A rank's row, as text. The passes of one colour are one path: a browser lays out thousands slowly. */
function rowOf(events, rank, scale, width, passes, chunks) {
  const y = rank * ROW + 1;
  const tall = ROW - 2;
  const paths = {};
  let micros = "";
  for (const [short, micro, chunk, from, to] of events) {
    const x = from * scale;
    const wide = (to - from) * scale;
    paths[[short, chunk]] = `${paths[[short, chunk]] ?? ""}M${x} ${y}h${wide}v${tall}h${-wide}z`;
    if (wide >= 1 + 5.6 * String(micro).length) {
      micros += `<text x="${x + wide / 2}" y="${y + ROW / 2 + 3}" class="micro">${micro}</text>`;
    }
  }
  const drawn = Object.entries(paths).map(([key, path]) => {
    const [short, chunk] = key.split(",");
    return `<path class="pass" fill="${colorOf(passes, short, chunk, chunks)}" d="${path}"/>`;
  });
  return `<rect class="row" x="0" y="${y}" width="${width}" height="${tall}"/>${drawn.join("")}${micros}`;
}

/** The ranks that wait for ever: a dashed box from where each stands, and an arrow to the rank that it waits for. */
function waitsOf({ waiting, timeline }, scale, width) {
  return waiting.map(([rank, word, source], i) => {
    const x = (timeline[rank].at(-1)?.[4] ?? 0) * scale;
    const y = rank * ROW + 1;
    const from = y + ROW / 2;
    const to = source * ROW + ROW / 2 + (source > rank ? -ROW / 2 + 3 : ROW / 2 - 1);
    const at = Math.min(x + 14 + 7 * i, width - 8);
    return (
      `<rect class="waits" x="${x + 1}" y="${y + 1}" width="${Math.max(4, width - x - 2)}" height="${ROW - 4}"/>` +
      `<text class="word" x="${at + 8}" y="${y + ROW / 2 + 3}">waits: ${word} of rank ${source}</text>` +
      `<path class="arrow" d="M${at} ${from}V${to}" marker-end="url(#waits-arrow)"/>`
    );
  });
}

/**
 * Draw the answer into a part of the page with .ranks, .scroll, .pointed and .legend. `passes` are the letters, names
 * and colours of docs/playground.py, `label` says it all in words. Returns the pixels of a second.
 */
function drawChart(part, found, { passes, label, zoom = 1, least = 0 }) {
  const { timeline, sizes, waiting = [] } = found;
  const [ranks, , chunks] = sizes;
  const scroll = part.querySelector(".scroll");
  const ends = timeline.flat().map((event) => event[4]);
  const total = found.seconds ?? Math.max(0, ...ends);
  const spare = waiting.length ? 190 : 12;
  const width = Math.max(60, scroll.clientWidth - 2, least * total + spare) * zoom;
  const height = ranks * ROW;
  const scale = total ? Math.min((width - spare) / total, waiting.length ? 40 * zoom : Infinity) : 1;
  const row = waiting.length ? width : total * scale;
  const made = timeline.map((events, rank) => rowOf(events, rank, scale, row, passes, chunks));
  made.push(...waitsOf({ waiting, timeline }, scale, width));
  const steps = [1, 2, 5].flatMap((n) => [0.1, 1, 10, 100].map((ten) => n * ten)).sort((a, b) => a - b);
  const apart = steps.find((each) => each * scale >= 45) ?? 1000;
  for (let time = 0; time <= total + 1e-9; time += apart) {
    const x = time * scale;
    made.push(
      `<line x1="${x}" x2="${x}" y1="${height}" y2="${height + 5}"/>` +
        `<text x="${x}" y="${height + 18}" text-anchor="${time ? "middle" : "start"}">${Number(time.toFixed(3))}</text>`,
    );
  }
  const head =
    '<marker id="waits-arrow" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="7" markerHeight="7" orient="auto">' +
    '<path d="M0 0L8 4L0 8z" fill="#d55e00"/></marker>';
  const size = `width: ${width}px; height: ${height + 22}px`;
  scroll.innerHTML = `<svg role="img" aria-label="${label}" style="${size}">${head}${made.join("")}</svg>`;
  part.querySelector(".ranks").replaceChildren(...timeline.map((_, rank) => labelled(`rank ${rank}`)));
  const drawn = new Set(timeline.flat().map((event) => event[0]));
  part.querySelector(".legend").replaceChildren(
    ...passes
      .filter(([short]) => drawn.has(short))
      .map(([short, name]) => {
        const key = labelled(`${short}: ${name}`);
        key.style.setProperty("--key", colorOf(passes, short, chunks - 1, chunks));
        return key;
      }),
  );
  const say = ({ clientX, clientY }) => {
    const { left, top } = scroll.firstChild.getBoundingClientRect();
    const rank = Math.floor((clientY - top) / ROW);
    const time = (clientX - left) / scale;
    const pass = timeline[rank]?.find((each) => each[3] <= time && time < each[4]);
    const pointed = part.querySelector(".pointed");
    if (pass) pointed.textContent = `${passName(pass)} on rank ${rank}, ${seconds(pass[3])} to ${seconds(pass[4])}`;
  };
  scroll.onpointermove = say;
  scroll.onclick = say;
  return scale;
}
