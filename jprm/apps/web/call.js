"use strict";
// Requests to the page's own server, with the key that it may ask for. The key stays in this tab.
const server = (() => {
  let key = "";
  try { key = sessionStorage.getItem("jprm key") || ""; } catch { /* no storage: the key is asked for again */ }

  // Returns the answer's JSON. Throws an Error with the server's message, or a TypeError where none answers.
  async function call(path, body) {
    const headers = key ? { Authorization: `Bearer ${key}` } : {};
    if (body) headers["Content-Type"] = "application/json";
    const answer = await fetch(path, { method: body ? "POST" : "GET", headers, cache: "no-store", redirect: "error",
                                       body: body && JSON.stringify(body) });
    const made = await answer.json().catch(() => ({}));
    if (answer.status === 401) document.getElementById("key").hidden = false;
    if (!answer.ok) throw Object.assign(new Error(made.error ? made.error.message : `status ${answer.status}`), { status: answer.status });
    return made;
  }

  // Takes the key of the form `key` when it is sent, then calls `then`.
  function asks(then) {
    const form = document.getElementById("key");
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      key = document.getElementById("key-text").value.trim();
      try { sessionStorage.setItem("jprm key", key); } catch { /* this tab keeps it */ }
      form.hidden = true;
      then();
    });
  }

  const said = (error) => (error instanceof TypeError ? "The server cannot be reached." : error.message);
  return { call, asks, said };
})();
