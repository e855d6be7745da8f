/** Requests to this server, with its key where it asks for one. */

const STORED = "jpaged-key";
const dialog = document.getElementById("key-dialog");
const input = document.getElementById("key-input");
let asking = null;

document.getElementById("key-cancel").addEventListener("click", () => dialog.close("cancel"));

/** The server wants a key, and the visitor has not given one. */
export class KeyNeeded extends Error {}

/** Like fetch. Where the server answers 401 it asks the visitor for a key and tries again. */
export async function request(path, options = {}) {
  for (;;) {
    const key = sessionStorage.getItem(STORED);
    const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
    // Relative: a proxy may serve this page under a path of its own (--root-path).
    const response = await fetch(path.slice(1), { ...options, headers });
    if (response.status !== 401) return response;
    if (sessionStorage.getItem(STORED) === key) await ask(key !== null);
  }
}

/** Sends an object as JSON. */
export function post(path, body, signal) {
  const headers = { "Content-Type": "application/json" };
  return request(path, { method: "POST", headers, body: JSON.stringify(body), signal });
}

/** One dialog for all that wait for a key. */
function ask(refused) {
  asking ??= new Promise((resolve, reject) => {
    document.getElementById("key-reason").textContent = refused
      ? "The server did not accept that key."
      : "It stays in this tab and goes nowhere but to this server.";
    input.value = "";
    dialog.returnValue = "";
    dialog.addEventListener("close", () => {
      asking = null;
      if (dialog.returnValue !== "ok") return reject(new KeyNeeded("This server asks for an API key."));
      sessionStorage.setItem(STORED, input.value.trim());
      input.value = "";
      resolve();
    }, { once: true });
    dialog.showModal();
  });
  return asking;
}
