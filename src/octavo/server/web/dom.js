// Small helpers around the page's nodes. Strings become text, never HTML.

export function element(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  Object.assign(node, properties);
  node.append(...children);
  return node;
}

export function byId(id) {
  return document.getElementById(id);
}

const SVG = "http://www.w3.org/2000/svg";

export function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

/** One of the page's symbols. */
export function icon(name) {
  return svg("svg", { class: "icon", "aria-hidden": "true" }, svg("use", { href: `#i-${name}` }));
}

export function iconButton(name, label, action) {
  const button = element("button", { type: "button", className: "icon-button", title: label }, icon(name));
  button.setAttribute("aria-label", label);
  button.dataset.action = action;
  return button;
}

/** Copies, also where the page is not served over https and the browser has no clipboard for it. */
export async function copyText(text) {
  if (navigator.clipboard) {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch {
      // forbidden: the older way may still be allowed
    }
  }
  const area = element("textarea", { value: text, className: "visually-hidden" });
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  return done;
}

export function download(filename, type, text) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  element("a", { href: url, download: filename }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}
