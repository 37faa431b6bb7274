// One answer of the model: the request for it, and the stream that becomes the text of a message.
import { streamChat } from "./api.js";
import { fenced, partOf } from "./attachments.js";

const LEAST_RATE_S = 0.1; // a rate over less time says nothing
const LEAST_PROMPT = 512; // tokens to compute; the progress of a shorter prompt would only flash
const ANSWER_LIMIT = 4096; // tokens of an answer without Max tokens; settings and `octavo run` have the same

/** The body of a request for the next message of a conversation. */
export function requestBody(conversation, model, sampling) {
  const messages = conversation.messages
    .filter((message) => message.role === "user" || message.content)
    .map((message) => ({ role: message.role, content: contentOf(message) }));
  if (conversation.system.trim()) messages.unshift({ role: "system", content: conversation.system });
  return {
    ...(model && { model }),
    messages,
    stream: true,
    stream_options: { include_usage: true },
    timings: true,
    return_progress: true,
    truncate_prompt_tokens: -1,
    truncation_side: "turns",
    ...sampling,
  };
}

/** What the model gets of a message: what it sees, its text, then its files. */
function contentOf({ content, images = [], media = [], files = [] }) {
  const text = [content, ...files.map(fenced)].filter(Boolean).join("\n\n");
  const shown = [...images, ...media].map(partOf);
  if (!shown.length) return text;
  return text ? [...shown, { type: "text", text }] : shown;
}

/**
 * Reads an answer into the message. `onChange(progress)` is called after each event; progress: { done, total } in tokens
 * while a long prompt is read, else null.
 *
 * The figures of the message: from the request to the first token, and tokens a second after it, in the end as the
 * server measured them.
 */
export async function receive(message, body, signal, onChange) {
  const start = performance.now();
  let first = null;
  let numDeltas = 0;
  for await (const event of streamChat(body, signal)) {
    const now = performance.now();
    const choice = event.choices?.[0];
    const text = choice?.delta?.content ?? "";
    const thought = choice?.delta?.reasoning_content ?? choice?.delta?.reasoning ?? "";
    if (text || thought) {
      first ??= now;
      numDeltas++;
      message.content += text;
      message.reasoning += thought;
      message.stats = stats(numDeltas, start, first, now);
    }
    if (choice?.finish_reason) message.ending = choice.finish_reason;
    if (event.usage?.truncated_tokens) message.truncated = event.usage.truncated_tokens;
    if (event.usage && first !== null) {
      message.stats = stats(event.usage.completion_tokens, start, first, now);
      // An answer may come in one burst: the server knows how long it took.
      message.stats.rate = event.timings?.predicted_per_second || message.stats.rate;
    }
    onChange(progressOf(event.prompt_progress));
    if (message.limit === null && numDeltas >= ANSWER_LIMIT && message.ending === "stopped") {
      message.ending = "limit";
      return; // which ends the request
    }
  }
}

/** Cached tokens count as done: only the rest takes time. */
function progressOf(progress) {
  if (!progress) return null;
  const { total, cache, processed } = progress;
  if (total - cache < LEAST_PROMPT || processed >= total) return null;
  return { done: processed, total };
}

function stats(tokens, start, first, now) {
  const elapsed = (now - first) / 1000;
  const rate = tokens > 1 && elapsed > LEAST_RATE_S ? (tokens - 1) / elapsed : null;
  return { tokens, firstToken: (first - start) / 1000, rate };
}
