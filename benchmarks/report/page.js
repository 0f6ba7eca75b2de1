// Interaction on the report's page: sort a table, show how a number was measured, save a figure.
// Without this script the page is complete: notes are links to its end, and tables keep their order.
"use strict";
(() => {
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const element = (tag, properties) => Object.assign(document.createElement(tag), properties);
  const said = document.body.appendChild(element("p", { className: "unseen" }));
  said.setAttribute("aria-live", "polite");

  // Sorting: the first press of a heading sorts up, the second down, and the third restores the order.
  const NEXT = { none: "ascending", ascending: "descending", descending: "none" };
  const compare = new Intl.Collator("en", { numeric: true }).compare;
  const key = (row, column) => {
    const cell = row.cells[column];
    return cell.dataset.value === undefined ? cell.dataset.text ?? cell.textContent : Number(cell.dataset.value);
  };
  const order = (column, sign) => (a, b) => {
    const [x, y] = [key(a, column), key(b, column)];
    if (x === "" || y === "") return (x === "") - (y === ""); // empty cells come last in both directions
    if (typeof x !== typeof y) return typeof x === "number" ? -1 : 1;
    return sign * (typeof x === "number" ? x - y : compare(x, y)) || a.dataset.place - b.dataset.place;
  };
  for (const table of all("table.sortable")) {
    const body = table.tBodies[0];
    all("tr", body).forEach((row, place) => (row.dataset.place = place));
    for (const heading of all("th", table.tHead)) {
      const button = heading.querySelector("button");
      button?.addEventListener("click", () => {
        const next = NEXT[heading.getAttribute("aria-sort") ?? "none"];
        all("th", table.tHead).forEach((each) => each.removeAttribute("aria-sort"));
        if (next !== "none") heading.setAttribute("aria-sort", next);
        const rows = [...body.rows].sort(
          next === "none"
            ? (a, b) => a.dataset.place - b.dataset.place
            : order(heading.cellIndex, next === "ascending" ? 1 : -1),
        );
        body.append(...rows);
        said.textContent = next === "none" ? "original order" : `sorted by ${button.textContent}, ${next}`;
      });
    }
  }

  // A table that is wider than the screen says so; its first column stays.
  for (const region of all(".scroll")) {
    const hint = element("p", { className: "hint", textContent: "scrolls sideways →", hidden: true });
    region.before(hint);
    new ResizeObserver(() => (hint.hidden = region.scrollWidth <= region.clientWidth)).observe(region);
  }

  // Notes: the text is at the end of the page; a number shows it as a tooltip, and on a click as a card.
  const card = element("div", { id: "card", hidden: true, tabIndex: -1 });
  card.setAttribute("role", "dialog");
  card.setAttribute("aria-label", "How this was measured");
  document.body.append(card);
  let opener = null;
  const NUMBERS = "tr[data-note] > td[data-value], td[data-note]";
  const note = (name) => document.getElementById(name);
  // The key of a cell's column in a result of the JSON.
  const keyOf = (cell) => cell.closest("table")?.tHead.rows[0].cells[cell.cellIndex]?.dataset.key ?? "";
  const noteOf = (at) => at.dataset.note ?? at.closest("tr").dataset.note;
  const hide = (back) => {
    if (card.hidden) return;
    card.hidden = true;
    if (back) opener?.focus();
  };
  const show = (at, name) => {
    const close = element("button", { className: "close", textContent: "✕", type: "button" });
    close.setAttribute("aria-label", "Close");
    close.addEventListener("click", () => hide(true));
    const key = at.matches("td") && keyOf(at) ? [element("code", { textContent: keyOf(at) }), " of "] : [];
    card.replaceChildren(...key, ...[...note(name).childNodes].map((each) => each.cloneNode(true)), close);
    all("[id]", card).forEach((each) => each.removeAttribute("id"));
    opener = at.closest("tr")?.querySelector("a.note") ?? at;
    card.hidden = false;
    const box = at.getBoundingClientRect();
    const left = Math.min(box.left, document.documentElement.clientWidth - card.offsetWidth - 16);
    const below = box.bottom + card.offsetHeight + 8 < innerHeight || box.top < card.offsetHeight + 8;
    card.style.left = `${Math.max(16, left) + scrollX}px`;
    card.style.top = `${scrollY + (below ? box.bottom + 6 : box.top - card.offsetHeight - 6)}px`;
    close.focus({ preventScroll: true });
  };
  document.addEventListener("click", (event) => {
    const link = event.target.closest("a.note");
    const cell = event.target.closest(NUMBERS);
    if (link) event.preventDefault();
    if (link) show(link, link.hash.slice(1));
    else if (cell && !event.target.closest("a, button") && !String(getSelection())) show(cell, noteOf(cell));
    else if (!event.target.closest("#card")) hide(false);
  });
  document.addEventListener("keydown", (event) => event.key === "Escape" && hide(true));
  document.addEventListener("mouseover", (event) => {
    const at = event.target.closest(`${NUMBERS}, a[data-note]`);
    if (!at || at.title) return;
    const source = keyOf(at) && `${keyOf(at)}; `;
    at.title = source + note(noteOf(at)).textContent.replace(/\s+/g, " ").trim();
  });

  // Figures: a saved file has no page around it, so write colours, background and size into it.
  const saved = (figure) => {
    const drawn = figure.querySelector("svg");
    const copy = drawn.cloneNode(true);
    const style = getComputedStyle(document.documentElement);
    const [x, y, width, height] = drawn.getAttribute("viewBox").split(/\s+/).map(Number);
    const edge = 8;
    const box = { x: x - edge, y: y - edge, width: width + 2 * edge, height: height + 2 * edge };
    const ground = document.createElementNS("http://www.w3.org/2000/svg", "rect");
    for (const [name, value] of Object.entries({ ...box, fill: "var(--card)" })) ground.setAttribute(name, value);
    const title = document.createElementNS("http://www.w3.org/2000/svg", "title");
    title.textContent = drawn.getAttribute("aria-label");
    copy.prepend(title, ground);
    copy.setAttribute("viewBox", Object.values(box).join(" "));
    copy.setAttribute("width", `${box.width}pt`);
    copy.setAttribute("height", `${box.height}pt`);
    const text = new XMLSerializer().serializeToString(copy);
    return text.replace(/var\((--[\w-]+)\)/g, (_, name) => style.getPropertyValue(name).trim());
  };
  for (const button of all("button.save")) {
    button.addEventListener("click", () => {
      const figure = button.closest("figure");
      const address = URL.createObjectURL(new Blob([saved(figure)], { type: "image/svg+xml" }));
      element("a", { href: address, download: `${figure.id}.svg` }).click();
      setTimeout(() => URL.revokeObjectURL(address), 1000);
    });
  }

  // A link into folded content unfolds it, and so does printing.
  const open = () => {
    const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    for (let at = target; at; at = at.parentElement) if (at.tagName === "DETAILS") at.open = true;
    target && target.scrollIntoView({ block: target.tagName === "TR" ? "center" : "start" });
  };
  addEventListener("hashchange", open);
  if (location.hash) open();
  let folded = [];
  addEventListener("beforeprint", () => (folded = all("details:not([open])")).forEach((each) => (each.open = true)));
  addEventListener("afterprint", () => folded.forEach((each) => (each.open = false)));

  // The contents highlight the section that the reader is in.
  const links = new Map(all("nav a").map((link) => [link.hash.slice(1), link]));
  const seen = new IntersectionObserver(
    (entries) => {
      for (const { isIntersecting, target } of entries) {
        if (!isIntersecting) continue;
        links.forEach((link) => link.removeAttribute("aria-current"));
        links.get(target.id)?.setAttribute("aria-current", "true");
      }
    },
    { rootMargin: "-10% 0px -80% 0px" },
  );
  all("section[id]").forEach((each) => links.has(each.id) && seen.observe(each));
})();
