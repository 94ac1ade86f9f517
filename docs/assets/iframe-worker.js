// Browsers start no workers for pages opened from a disk. There the search runs in a hidden frame with a worker's interface.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      this.loaded = new Promise(resolve => { frame.addEventListener("load", () => resolve(frame.contentWindow)) })
      frame.answer = data => this.dispatchEvent(new MessageEvent("message", { data }))
      frame.srcdoc = `<script>window.postMessage = data => frameElement.answer(data)</` + `script><script src="${url}"></` + `script>`
      document.body.append(frame)
    }

    postMessage(data) {
      this.loaded.then(frame => frame.dispatchEvent(new MessageEvent("message", { data })))
    }

    terminate() {}
  }
}
