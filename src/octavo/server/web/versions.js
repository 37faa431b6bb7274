// Versions of a message. Each keeps the messages that followed it; the conversation holds the version on display.
//
// A message with versions has `versions: { at, tails }`. `tails[i]` is version i with all that follows it, and null at
// `at`, the place of the message itself.

/**
 * Takes the messages from `index` on out of the conversation.
 * Returns `versions` for the message that takes their place, undefined if there is nothing to go back to.
 */
export function setAside(messages, index) {
  const tail = messages.splice(index);
  const { at, tails } = tail[0].versions ?? { at: 0, tails: [null] };
  delete tail[0].versions;
  const isEmpty = tail[0].role === "assistant" && !tail[0].content; // an answer that failed
  if (isEmpty) return tails.length > 1 ? { at, tails } : undefined;
  return { at: tails.length, tails: [...tails.map((other, i) => (i === at ? tail : other)), null] };
}

/** Puts another version of the message at `index` in its place. */
export function turnTo(messages, index, position) {
  const tail = messages.splice(index);
  const { at, tails } = tail[0].versions;
  delete tail[0].versions;
  const [first, ...rest] = tails[position];
  const others = tails.map((other, i) => (i === position ? null : i === at ? tail : other));
  messages.push({ ...first, versions: { at: position, tails: others } }, ...rest);
}
