// Search in a site that was opened from a folder: browsers start no worker for file: pages, so there a worker is a hidden frame.
// The theme knows the frame's page by the name IFrameWorker, and reads the index from search/search_index.js.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inner = frame.contentWindow;
      inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      inner.importScripts = async (...urls) => { for (const each of urls) await load(inner, each); };
      this.postMessage = (data) => ready.then(() => inner.dispatchEvent(new inner.MessageEvent("message", { data })));
      const ready = load(inner, new URL(url, document.baseURI).href);
    }
  };
  window.Worker = window.IFrameWorker;
  const load = (inner, url) => new Promise((done, failed) => {
    const script = inner.document.createElement("script");
    Object.assign(script, { src: url, onload: done, onerror: failed });
    inner.document.body.append(script);
  });
}
