// Formulas in Markdown: rules that find `$…$`, `$$…$$`, `\(…\)` and `\[…\]`, and KaTeX, which writes them as MathML.
// MathML is drawn by the browser itself: it needs no fonts, no style sheet, and screen readers can read it.
import "./vendor/katex.js";

const MAX_LENGTH = 2000; // of a formula's source; a longer one stays text
const MAX_LINES = 100; // of a formula's source
const MAX_CACHED = 500;
const PAIRS = [["$$", "$$", true], ["\\[", "\\]", true], ["\\(", "\\)", false], ["$", "$", false]];
const OPTIONS = { output: "mathml", throwOnError: true, strict: "ignore", trust: false, maxSize: 20, maxExpand: 500 };
const STYLE = / style="[^"]*"/g; // the page's policy forbids them; quotes in KaTeX's text are escaped
const ANNOTATION = /<annotation .*?<\/annotation>/s; // the source, which a sanitizer would show as text

const cache = new Map();

/** The formula as MathML, or null if it is none that KaTeX knows. */
function mathml(source, displayMode) {
  const key = `${displayMode}${source}`;
  if (!cache.has(key)) {
    if (cache.size >= MAX_CACHED) cache.delete(cache.keys().next().value);
    let found = null;
    try {
      const html = globalThis.katex.renderToString(source, { ...OPTIONS, displayMode });
      found = html.replace(ANNOTATION, "").replace(STYLE, "");
    } catch {
      // unknown commands, or not finished yet: its source is shown
    }
    cache.set(key, found);
  }
  return cache.get(key);
}

/** The index of the closing mark, or -1. A mark after a backslash closes nothing. */
function findClose(text, close, from, end) {
  let at = text.indexOf(close, from);
  while (at >= 0 && at < end) {
    let slashes = 0;
    while (text[at - 1 - slashes] === "\\") slashes++;
    if (slashes % 2 === 0) return at;
    at = text.indexOf(close, at + 1);
  }
  return -1;
}

function inlineRule(state, silent) {
  const { src, pos } = state;
  if (src[pos] !== "$" && src[pos] !== "\\") return false;
  const pair = PAIRS.find(([open]) => src.startsWith(open, pos));
  if (!pair) return false;
  const [open, close, isDisplay] = pair;
  const start = pos + open.length;
  const end = findClose(src, close, start, Math.min(state.posMax, start + MAX_LENGTH));
  if (end <= start) return false;
  const source = src.slice(start, end);
  // As in Pandoc, so that prices stay prices: no space inside of the marks, no digit after them.
  if (close === "$" && (/^\s|\s$/.test(source) || /\d/.test(src[end + 1] ?? ""))) return false;
  if (!silent) {
    const token = state.push("math", "", 0);
    token.content = source;
    token.markup = open;
    token.meta = { close, isDisplay };
  }
  state.pos = end + close.length;
  return true;
}

function blockRule(state, startLine, endLine, silent) {
  const begin = state.bMarks[startLine] + state.tShift[startLine];
  const pair = PAIRS.slice(0, 2).find(([open]) => state.src.startsWith(open, begin));
  if (!pair || state.sCount[startLine] - state.blkIndent >= 4) return false;
  const [open, close] = pair;
  const last = Math.min(endLine, startLine + MAX_LINES);
  for (let line = startLine; line < last; line++) {
    if (line > startLine && state.sCount[line] < state.blkIndent) return false;
    const from = line === startLine ? begin + open.length : state.bMarks[line];
    const text = state.src.slice(from, state.eMarks[line]);
    const at = text.indexOf(close);
    if (at < 0) continue;
    if (text.slice(at + close.length).trim()) return false; // words after it: the inline rule reads it
    if (silent) return true;
    const token = state.push("math", "", 0);
    token.content = state.src.slice(begin + open.length, from + at);
    token.markup = open;
    token.meta = { close, isDisplay: true };
    token.map = [startLine, line + 1];
    token.block = true;
    state.line = line + 1;
    return true;
  }
  return false;
}

function render(tokens, index, escapeHtml) {
  const { content, markup, block, meta } = tokens[index];
  const found = content.length <= MAX_LENGTH ? mathml(content.trim(), meta.isDisplay) : null;
  const html = found ?? `<code>${escapeHtml(markup + content + meta.close)}</code>`;
  return block ? `<p class="formula">${html}</p>` : html;
}

/** A plug-in for markdown-it. */
export function formulas(markdown) {
  markdown.inline.ruler.before("escape", "math", inlineRule);
  markdown.block.ruler.before("fence", "math", blockRule, { alt: ["paragraph", "reference", "blockquote", "list"] });
  markdown.renderer.rules.math = (tokens, index) => render(tokens, index, markdown.utils.escapeHtml);
}
