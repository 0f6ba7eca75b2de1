// Browsers start no Worker from a page that is a file. There an iframe runs the worker's script: the search's. A
// data: address is no file, and gets a worker: the playground's.
if (location.protocol === "file:") {
  const { Worker } = window;
  window.Worker = class extends EventTarget {
    constructor(url, options) {
      super();
      if (String(url).startsWith("data:")) return new Worker(url, options);
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.documentElement.append(frame);
      this.inside = frame.contentWindow;
      this.inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = this.inside.document.createElement("script");
      script.src = new URL(url, document.baseURI);
      this.ready = new Promise((resolve) => (script.onload = resolve));
      this.inside.document.head.append(script);
    }

    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new this.inside.MessageEvent("message", { data })));
    }
  };
}
