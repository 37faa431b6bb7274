// The part of the server's HTTP interface that the pages use.

const KEY = "octavo.api-key";

/** The key lives as long as the tab: it is a secret, and other pages of this origin have no use for it. */
export function apiKey() {
  try {
    return sessionStorage.getItem(KEY) ?? "";
  } catch {
    return "";
  }
}

export function setApiKey(key) {
  try {
    if (key) sessionStorage.setItem(KEY, key);
    else sessionStorage.removeItem(KEY);
  } catch {
    // storage is forbidden: the field has to be filled in again
  }
}

/** What went wrong, in words for people. status: 0 if there was no answer at all. */
export class ServerError extends Error {
  constructor(status, message, code = null, retryAfter = null) {
    super(message);
    this.status = status;
    this.code = code;
    this.retryAfter = retryAfter;
  }

  get text() {
    if (this.status === 0) return "The server cannot be reached. Is it still running?";
    if (this.status === 401 && apiKey()) return "The server does not accept this API key. Check it in the settings.";
    if (this.status === 401) return "This server requires an API key. Enter it in the settings.";
    if (this.code === "server_overloaded" || this.code === "queue_timeout") {
      const when = this.retryAfter ? ` Try again in ${this.retryAfter} s.` : " Try again in a moment.";
      return `The server is busy.${when}`;
    }
    if (this.code === "context_length_exceeded") {
      return `The conversation has become too long for the model. Start a new chat, or edit an earlier message. (${this.message})`;
    }
    return this.message;
  }
}

function headers() {
  const key = apiKey();
  return key ? { Authorization: `Bearer ${key}` } : {};
}

async function request(path, options = {}) {
  let response;
  try {
    response = await fetch(path, { ...options, headers: { ...headers(), ...options.headers } });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError(0, String(error));
  }
  if (response.ok) return response;
  let message = `The server answered with status ${response.status}.`;
  let code = null;
  try {
    const body = await response.json();
    message = body.error?.message ?? message;
    code = body.error?.code ?? null;
  } catch {
    // no JSON: the status has to do
  }
  throw new ServerError(response.status, message, code, response.headers.get("Retry-After"));
}

export async function getJson(path, options) {
  return (await request(path, options)).json();
}

/** The events of a streamed chat completion, each parsed. Throws ServerError, also for an error in mid-stream. */
export async function* streamChat(body, signal) {
  const response = await request("/v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  let isDone = false;
  for await (const data of eventData(response.body)) {
    if (data === "[DONE]") {
      isDone = true; // the end of the response follows; leaving now would look like a client that went away
      continue;
    }
    const event = JSON.parse(data);
    if (event.error) throw new ServerError(500, event.error.message, event.error.code);
    yield event;
  }
  if (!isDone) throw new ServerError(0, "the stream ended early");
}

async function* eventData(stream) {
  const reader = stream.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  try {
    for (;;) {
      let chunk;
      try {
        chunk = await reader.read();
      } catch (error) {
        if (error.name === "AbortError") throw error;
        throw new ServerError(0, String(error));
      }
      if (chunk.done) return;
      const lines = (rest + decoder.decode(chunk.value, { stream: true })).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data:")) yield line.slice(5).trim();
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
