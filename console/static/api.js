// Requests to the console's server: JSON answers, and streams of server-sent events. The token is
// sent in a header, which EventSource cannot do, so streams are read with fetch.

const KEY = "fencepost-console-token";
const FIRST_PAUSE_MS = 500;
const LAST_PAUSE_MS = 5_000;

export class Refused extends Error {
  constructor(status, told) {
    super(told.message ?? `status ${status}`);
    this.status = status;
    this.word = told.error ?? "broken";
  }
}

export const token = {
  get: () => localStorage.getItem(KEY) ?? "",
  set: (text) => localStorage.setItem(KEY, text.trim()),
  // The token comes in the URL's fragment, which the browser never sends, and is removed from it.
  takeFromUrl() {
    const match = /^#token=([^&]+)/.exec(location.hash);
    if (!match) return;
    this.set(decodeURIComponent(match[1]));
    history.replaceState(null, "", `${location.pathname}#/overview`);
  },
};

const headers = (more) => ({ Authorization: `Bearer ${token.get()}`, ...more });

const url = (name, params) => {
  const query = new URLSearchParams(Object.entries(params ?? {}).filter(([, value]) => value !== "" && value != null));
  return `/api/${name}${query.size ? `?${query}` : ""}`;
};

async function told(response) {
  let body = {};
  try {
    body = await response.json();
  } catch {
    // A proxy has answered, not the console.
  }
  if (!response.ok) throw new Refused(response.status, body);
  return body;
}

export async function get(name, params, signal) {
  return told(await fetch(url(name, params), { headers: headers(), signal }));
}

export async function post(name, body) {
  return told(
    await fetch(url(name), {
      method: "POST",
      headers: headers({ "Content-Type": "application/json", "X-Fencepost-Console": "1" }),
      body: JSON.stringify(body),
    }),
  );
}

/** Read one stream to its end: `on(event, data)` for each event. Throws Refused, TypeError. */
export async function stream(name, params, on, signal) {
  const response = await fetch(url(name, params), { headers: headers({ Accept: "text/event-stream" }), signal });
  if (!response.ok) await told(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const event = /^event: (.*)$/m.exec(block)?.[1];
      const data = /^data: (.*)$/m.exec(block)?.[1];
      if (event && data) on(event, JSON.parse(data));
    }
  }
}

/** Follow a view until `signal`: `on.data(data, at)`, `on.away(told)`, `on.refused(error)`. */
export async function follow(name, params, on, signal) {
  let pause = FIRST_PAUSE_MS;
  while (!signal.aborted) {
    try {
      await stream(
        name,
        params,
        (event, frame) => {
          pause = FIRST_PAUSE_MS;
          if (event === "data") on.data(frame.data, frame.at_ms);
          else if (event === "pulse") on.pulse(frame);
          else on.away(frame.data);
        },
        signal,
      );
      on.away({ error: "console", message: "the console has ended the connection" });
    } catch (error) {
      if (signal.aborted) return;
      if (error instanceof Refused && error.status < 500 && error.status !== 429) {
        on.refused(error);
        return;
      }
      on.away(
        error instanceof Refused
          ? { error: error.word, message: error.message }
          : { error: "console", message: "the console itself does not answer; is `fencepost console` still running?" },
      );
    }
    await new Promise((resolve) => setTimeout(resolve, pause));
    pause = Math.min(2 * pause, LAST_PAUSE_MS);
  }
}
