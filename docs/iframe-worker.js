/* Runs the script of a worker in a hidden frame. Browsers start no workers in pages that they read from files, and the
   search of the website is one. */
if (location.protocol === "file:")
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.body.appendChild(document.createElement("iframe"));
      frame.hidden = true;
      this.scope = frame.contentWindow;
      this.scope.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.scope.importScripts = (...urls) => Promise.all(urls.map((script) => this.load(script)));
      this.loaded = this.load(url);
    }

    load(url) {
      return new Promise((resolve, reject) => {
        const script = this.scope.document.createElement("script");
        Object.assign(script, { src: url, async: false, onload: resolve, onerror: reject });
        this.scope.document.body.append(script);
      });
    }

    postMessage(data) {
      this.loaded.then(() => this.scope.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
