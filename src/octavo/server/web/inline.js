// The inside of a Markdown paragraph: emphasis, code, links. Every search is bounded, so that no text takes long.
import { element } from "./dom.js";

const MAX_DEPTH = 16;
const MAX_LABEL = 500;
const SPECIAL = /[\\`*_~[!<\n]|https?:\/\//g;
const TARGET = /\( *<?([^\s<>()]*(?:\([^\s<>()]*\)[^\s<>()]*)*)>?(?: +"[^"]*")? *\)/y;
const BARE_URL = /https?:\/\/[^\s<>"'`]{1,2000}/y;
const ANGLE_URL = /<(https?:\/\/[^\s<>]+|mailto:[^\s<>]+)>/y;
const BREAK = /<br *\/?>/iy;
const WORD = /[\p{L}\p{N}_]/u;

/** The nodes of a text. */
export function inlineNodes(text, depth = 0) {
  return new InlineReader(text, depth).read();
}

function linkTo(url, ...content) {
  let parsed;
  try {
    parsed = new URL(url);
  } catch {
    return null;
  }
  if (!["http:", "https:", "mailto:"].includes(parsed.protocol)) return null;
  return element("a", { href: parsed.href, target: "_blank", rel: "noopener noreferrer nofollow" }, ...content);
}

class InlineReader {
  #text;
  #depth;
  #nodes = [];
  #plain = "";
  #unclosed = new Set(); // delimiters that nothing closes any more

  constructor(text, depth) {
    this.#text = text;
    this.#depth = depth;
  }

  read() {
    const text = this.#text;
    if (this.#depth > MAX_DEPTH) return [document.createTextNode(text)];
    let at = 0;
    while (at < text.length) {
      SPECIAL.lastIndex = at;
      const match = SPECIAL.exec(text);
      if (!match) break;
      this.#plain += text.slice(at, match.index);
      at = match.index;
      const end = this.#special(at);
      if (end === at) this.#plain += text[at++];
      else at = end;
    }
    this.#plain += text.slice(at);
    this.#flush();
    return this.#nodes;
  }

  #flush() {
    if (this.#plain) this.#nodes.push(document.createTextNode(this.#plain));
    this.#plain = "";
  }

  #push(node, end) {
    this.#flush();
    this.#nodes.push(node);
    return end;
  }

  /** Reads what begins at `at`; returns where it ends, or `at` if it is only a character. */
  #special(at) {
    const char = this.#text[at];
    switch (char) {
      case "\\":
        return this.#escape(at);
      case "`":
        return this.#code(at);
      case "\n":
        return this.#lineBreak(at);
      case "[":
        return this.#link(at, at);
      case "!":
        return this.#text[at + 1] === "[" ? this.#link(at, at + 1) : at;
      case "<":
        return this.#angle(at);
      case "h":
        return this.#bareUrl(at);
      default:
        return this.#emphasis(at, char);
    }
  }

  #escape(at) {
    const next = this.#text[at + 1];
    if (next === "\n") return this.#push(element("br"), at + 2);
    if (!next || !/[!-/:-@[-`{-~]/.test(next)) return at;
    this.#plain += next;
    return at + 2;
  }

  #lineBreak(at) {
    const isHard = this.#plain.endsWith("  ");
    this.#plain = this.#plain.trimEnd();
    if (isHard) return this.#push(element("br"), at + 1);
    this.#plain += "\n";
    return at + 1;
  }

  #code(at) {
    const text = this.#text;
    let size = 1;
    while (text[at + size] === "`") size++;
    const fence = "`".repeat(size);
    let end = this.#unclosed.has(fence) ? -1 : text.indexOf(fence, at + size);
    while (end >= 0 && text[end + size] === "`") {
      let next = end + size;
      while (text[next] === "`") next++;
      end = text.indexOf(fence, next);
    }
    if (end < 0) {
      this.#unclosed.add(fence);
      this.#plain += fence;
      return at + size;
    }
    let content = text.slice(at + size, end).replace(/\n/g, " ");
    if (/^ .*\S.* $/.test(content)) content = content.slice(1, -1);
    return this.#push(element("code", {}, content), end + size);
  }

  #angle(at) {
    ANGLE_URL.lastIndex = BREAK.lastIndex = at;
    const match = ANGLE_URL.exec(this.#text);
    const link = match && linkTo(match[1], match[1]);
    if (link) return this.#push(link, at + match[0].length);
    const lineBreak = BREAK.exec(this.#text);
    return lineBreak ? this.#push(element("br"), at + lineBreak[0].length) : at;
  }

  #bareUrl(at) {
    BARE_URL.lastIndex = at;
    let url = BARE_URL.exec(this.#text)?.[0];
    if (!url) return at;
    url = url.replace(/[.,;:!?*_~\]]+$/, "");
    if (url.endsWith(")") && !url.includes("(")) url = url.slice(0, -1);
    const link = linkTo(url, url);
    return link ? this.#push(link, at + url.length) : at;
  }

  #link(at, bracket) {
    const text = this.#text;
    let level = 0;
    let close = -1;
    for (let i = bracket; i < Math.min(text.length, bracket + MAX_LABEL); i++) {
      if (text[i] === "\\") i++;
      else if (text[i] === "[") level++;
      else if (text[i] === "]" && --level === 0) {
        close = i;
        break;
      }
    }
    if (close < 0) return at;
    TARGET.lastIndex = close + 1;
    const match = TARGET.exec(text);
    if (!match) return at;
    const label = text.slice(bracket + 1, close);
    const isImage = bracket > at; // a picture from elsewhere is only a link: the page loads nothing
    const content = isImage ? [label || match[1]] : inlineNodes(label, this.#depth + 1);
    const link = linkTo(match[1], ...content);
    return link ? this.#push(link, close + 1 + match[0].length) : at;
  }

  #emphasis(at, char) {
    const text = this.#text;
    let size = 1;
    while (text[at + size] === char) size++;
    const wanted = char === "~" ? size === 2 : size <= 3;
    const opens = /\S/.test(text[at + size] ?? " ") && !(char === "_" && at > 0 && WORD.test(text[at - 1]));
    const end = wanted && opens ? this.#closer(at + size, char, size) : -1;
    if (end < 0) {
      this.#plain += char.repeat(size);
      return at + size;
    }
    const content = inlineNodes(text.slice(at + size, end), this.#depth + 1);
    let node;
    if (char === "~") node = element("del", {}, ...content);
    else if (size === 1) node = element("em", {}, ...content);
    else if (size === 2) node = element("strong", {}, ...content);
    else node = element("strong", {}, element("em", {}, ...content));
    return this.#push(node, end + size);
  }

  #closer(from, char, size) {
    const text = this.#text;
    const delimiter = char.repeat(size);
    if (this.#unclosed.has(delimiter)) return -1;
    let i = from;
    while (i < text.length) {
      if (text[i] === "\\") {
        i += 2;
      } else if (text[i] === "`") {
        const end = text.indexOf("`", i + 1);
        i = end < 0 ? i + 1 : end + 1;
      } else if (text[i] === char) {
        let run = 1;
        while (text[i + run] === char) run++;
        const closes = run === size && /\S/.test(text[i - 1]) && !(char === "_" && WORD.test(text[i + run] ?? " "));
        if (closes) return i;
        i += run;
      } else {
        i++;
      }
    }
    this.#unclosed.add(delimiter);
    return -1;
  }
}
