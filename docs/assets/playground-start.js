// Start Python in a worker, by Pyodide, with the library's sources: `askPython` asks one of docs/*.py, and the page
// stays alive meanwhile.
//
// A page that is a file may not fetch other files, nor start a worker from one. So `make site` puts Pyodide, Python's
// standard library and the library's sources into playground-python.js, as the base64 of their gzip (EMBEDDED). Each
// becomes a blob. The worker's script is a data: address, which browsers do start.
"use strict";

/** A file of EMBEDDED as a blob. */
async function unpacked(name, type) {
  const packed = await fetch(`data:application/gzip;base64,${EMBEDDED[name]}`);
  const stream = packed.body.pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream, { headers: { "Content-Type": type } }).blob();
}

/** The worker's script, as its source: it gets the files, then questions. */
function worker() {
  async function start({ pyodide: script, module, wasm, library, lock, sources }) {
    const { loadPyodide } = await import(URL.createObjectURL(script));
    const { default: createPyodideModule } = await import(URL.createObjectURL(module));
    const pyodide = await loadPyodide({
      createPyodideModule,
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
    return (name) => pyodide.pyimport(name);
  }
  let python;
  self.onmessage = async ({ data }) => {
    if (data.files) {
      python = start(data.files);
      return;
    }
    const { number, module, name, request } = data;
    try {
      const asked = (await python)(module)[name];
      const text = request === undefined ? asked() : asked(JSON.stringify(request));
      self.postMessage({ number, answer: JSON.parse(text) });
    } catch (error) {
      self.postMessage({ number, error: String(error) });
    }
  };
}

const pythonFiles = (async () => {
  const [pyodide, module, wasm, library, lock, sources] = await Promise.all([
    unpacked("pyodide.mjs", "text/javascript"),
    unpacked("pyodide.asm.mjs", "text/javascript"),
    unpacked("pyodide.asm.wasm", "application/wasm"),
    unpacked("python_stdlib.zip", "application/zip"),
    unpacked("pyodide-lock.json", "application/json"),
    unpacked("sources.json", "application/json"),
  ]);
  return { pyodide, module, wasm, library, lock, sources };
})();

let pythonWorker = null;
let questions = 0;
const asking = new Map(); // the questions without an answer, by number

async function startWorker() {
  const files = await pythonFiles;
  const made = new Worker(`data:text/javascript,${encodeURIComponent(`(${worker})()`)}`, { type: "module" });
  made.onmessage = ({ data }) => {
    const { resolve, reject } = asking.get(data.number) ?? {};
    asking.delete(data.number);
    if (data.error) reject?.(new Error(data.error));
    else resolve?.(data.answer);
  };
  made.onerror = (event) => {
    for (const { reject } of asking.values()) reject(new Error(event.message ?? "the worker does not start"));
    asking.clear();
  };
  made.postMessage({ files });
  return made;
}

/** Ask a function of a module: the object that it answers as JSON. */
async function askPython(module, name, request) {
  pythonWorker ??= startWorker();
  const running = await pythonWorker;
  const number = questions++;
  const answer = new Promise((resolve, reject) => asking.set(number, { resolve, reject }));
  running.postMessage({ number, module, name, request });
  return answer;
}

/** Stop Python where it is, as in a loop without an end. The next question starts it anew. */
async function stopPython(why) {
  const stopped = pythonWorker;
  pythonWorker = null;
  (await stopped)?.terminate();
  for (const { reject } of asking.values()) reject(new Error(why));
  asking.clear();
}

/** The same work, but never twice at a time: what is wanted meanwhile is done once, at the end, as of then. */
function latest(work) {
  let running = false;
  let again = false;
  return async () => {
    again = true;
    if (running) return;
    running = true;
    while (again) {
      again = false;
      await work();
    }
    running = false;
  };
}

/** Put what a part of the page shows into its address, and try to copy that. */
async function shareLink(name, state, status) {
  const link = `${location.href.replace(/#.*/, "")}#${name}=${encodeURIComponent(JSON.stringify(state))}`;
  history.replaceState(null, "", link);
  const copied = await navigator.clipboard?.writeText(link).then(() => true, () => false);
  status.textContent = copied ? "The link is copied, and in the address bar." : "The link is in the address bar.";
}

/** What a link says about a part of the page; null for nothing. */
function sharedState(name) {
  const found = location.hash.match(new RegExp(`^#${name}=(.*)$`));
  try {
    return found && JSON.parse(decodeURIComponent(found[1]));
  } catch {
    return null;
  }
}

/** An element with these properties and children. */
function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

/** A span with a text. */
function labelled(text) {
  return element("span", { textContent: text });
}

/** A table of these titles and rows; a cell is a text or an element. A narrow screen scrolls it. */
function tableOf(titles, rows) {
  const table = document.createElement("table");
  const head = table.createTHead().insertRow();
  for (const title of titles) head.append(element("th", { textContent: title, scope: "col" }));
  const body = table.createTBody();
  for (const each of rows) {
    const row = body.insertRow();
    for (const cell of each) row.insertCell().append(cell);
  }
  return element("div", { className: "table" }, table);
}
