// Talking to the gateway: reading, logging in, following a run.

import { keepTime } from "./dom.js";

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** The JSON of a control route. Throws Refused with the gateway's own reason. */
export async function get(path, signal) {
  const response = await fetch(path, { signal, headers: { accept: "application/json" } });
  const body = await response.json().catch(() => null);
  if (!response.ok) throw new Refused(response.status, body?.error?.message ?? response.statusText);
  return body;
}

/** What the dashboard's own routes answer. */
export async function data(path, signal, query = {}) {
  const kept = Object.entries(query).filter(([, value]) => value !== "" && value != null);
  const tail = new URLSearchParams(kept).toString();
  const body = await get("/ui/data/" + path.map(encodeURIComponent).join("/") + (tail ? "?" + tail : ""), signal);
  keepTime(body.now);
  return body.data;
}

export async function logIn(key) {
  const response = await fetch("/ui/login", { method: "POST", body: key });
  if (!response.ok) throw new Refused(response.status, (await response.json()).error.message);
}

export async function logOut() {
  const response = await fetch("/ui/logout", { method: "POST" });
  if (!response.ok) throw new Refused(response.status, response.statusText);
}

export function pause(milliseconds, signal) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, milliseconds);
    signal.addEventListener("abort", () => (clearTimeout(timer), reject(signal.reason)), { once: true });
  });
}

/** Do it again and again until the signal; a gateway that is away for a while is asked until it is back. */
export async function repeat(work, milliseconds, signal) {
  while (!signal.aborted) {
    try {
      await work();
      connected(true);
    } catch (error) {
      if (signal.aborted) return;
      if (error instanceof Refused && error.status === 401) throw error;
      connected(false);
    }
    await pause(milliseconds, signal).catch(() => {});
  }
}

/** Call `changed(changes)` for what happens in a run after the cursor, at most about once a second. */
export function follow(run, cursor, changed, signal) {
  return repeat(
    async () => {
      const query = new URLSearchParams({ run, after: cursor, wait_s: 25 });
      const changes = await get("/api/changes?" + query, signal);
      if (changes.length) {
        await changed(changes); // where this fails, they are asked for again
        cursor = changes.at(-1).cursor;
      }
    },
    700,
    signal,
  );
}

function connected(yes) {
  document.documentElement.dataset.connected = yes ? "yes" : "no";
}
