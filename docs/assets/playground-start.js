// Start Python in the page, by Pyodide, with the library's sources: `playgroundPython` is a promise of its `import`.
//
// A page that is a file may not fetch other files. So `make site` puts Pyodide, Python's standard library and the
// library's sources into playground-python.js, as the base64 of their gzip (EMBEDDED), and each becomes a blob.
"use strict";

/** A file of EMBEDDED as a blob. */
async function unpacked(name, type) {
  const packed = await fetch(`data:application/gzip;base64,${EMBEDDED[name]}`);
  const stream = packed.body.pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream, { headers: { "Content-Type": type } }).blob();
}

/** Start Python and give it the library's sources. Returns a function that imports a module. */
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
  return (name) => pyodide.pyimport(name);
}

const playgroundPython = start();

/** A span with a text. */
function labelled(text) {
  const made = document.createElement("span");
  made.textContent = text;
  return made;
}

/** A table of these titles and rows. */
function tableOf(titles, rows) {
  const table = document.createElement("table");
  const head = table.createTHead().insertRow();
  for (const title of titles) {
    head.append(Object.assign(document.createElement("th"), { textContent: title, scope: "col" }));
  }
  const body = table.createTBody();
  for (const each of rows) {
    const row = body.insertRow();
    for (const text of each) row.insertCell().textContent = text;
  }
  return table;
}
