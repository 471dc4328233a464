// Lets the search run where the pages are opened from a folder: browsers start no worker from a file there.
// A worker's script runs in a hidden frame instead, and messages go both ways as events. On a web server nothing changes.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    #frame = document.createElement("iframe");
    #waiting = [];
    constructor(address) {
      super();
      this.#frame.hidden = true;
      document.documentElement.append(this.#frame);
      const inside = this.#frame.contentWindow;
      inside.postMessage = (data) => setTimeout(() => this.#tell(new MessageEvent("message", { data })));
      const script = inside.document.createElement("script");
      script.src = new URL(address, location.href).href;
      script.onload = () => {
        const messages = this.#waiting;
        this.#waiting = null;
        messages.forEach((data) => this.postMessage(data));
      };
      inside.document.documentElement.append(script);
    }
    #tell(event) {
      this.dispatchEvent(event);
      this.onmessage?.(event);
    }
    postMessage(data) {
      if (this.#waiting) {
        this.#waiting.push(data);
        return;
      }
      const inside = this.#frame.contentWindow;
      const event = new inside.MessageEvent("message", { data: structuredClone(data) });
      setTimeout(() => inside.dispatchEvent(event));
    }
    terminate() {
      this.#frame.remove();
    }
  };
}
