// Small line charts: a card with the latest values, and 15 minutes of history as SVG.
import { element, svg } from "./dom.js";

const LEAST_SPAN_S = 60; // a young chart shows less, instead of being mostly empty
const WIDTH = 300;
const HEIGHT = 100;

export class Chart {
  #span;
  #format;
  #names;
  #least;
  #value;
  #legend;
  #svg;
  #top;
  #since;
  #points = []; // { time, values }

  /** span: seconds shown. names: of the series. format: a value to [text, unit]. least: the axis reaches this far. */
  constructor({ title, names, span, format, least }) {
    this.#span = span;
    this.#format = format;
    this.#names = names;
    this.#least = least;
    this.#value = element("p", { className: "value" });
    this.#legend = element("p", { className: "legend" });
    this.#svg = svg("svg", { class: "chart", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" });
    this.#svg.setAttribute("aria-label", `${title}, the last ${Math.round(span / 60)} minutes`);
    this.#top = element("span", { className: "top" });
    this.#since = element("span");
    const plot = element("div", { className: "plot" }, this.#top, this.#svg);
    const axis = element("p", { className: "axis" }, this.#since, element("span", {}, "now"));
    this.node = element("figure", { className: "card" }, element("h2", {}, title), this.#value, this.#legend, plot, axis);
  }

  clear() {
    this.#points = [];
  }

  /** values: one a series, null where there is nothing to say. note: instead of the first value's own text. isDrawn: false if more follow. */
  push(time, values, note = null, isDrawn = true) {
    this.#points.push({ time, values });
    while (this.#points[0].time < time - this.#span) this.#points.shift();
    if (!isDrawn) return;
    this.#showValues(values, note);
    this.#draw(time);
  }

  #showValues(values, note) {
    const [text, unit] = note ?? this.#text(values[0]);
    this.#value.replaceChildren(text, element("small", {}, unit));
    if (this.#names.length < 2) return;
    const entries = this.#names.map((name, i) => {
      const [entry, entryUnit] = this.#text(values[i]);
      const text = entryUnit.includes("/") ? entry : `${entry} ${entryUnit}`.trim();
      return element("span", { className: `s${i + 1}` }, `${name} ${text}`);
    });
    this.#legend.replaceChildren(...entries);
  }

  #text(value) {
    return value == null ? ["–", ""] : this.#format(value);
  }

  #draw(now) {
    const highest = Math.max(this.#least, ...this.#points.flatMap((point) => point.values.map((value) => value ?? 0)));
    const top = niceCeiling(highest);
    const span = Math.min(this.#span, Math.max(LEAST_SPAN_S, now - this.#points[0].time));
    const x = (time) => WIDTH - ((now - time) / span) * WIDTH;
    const y = (value) => HEIGHT - 1 - (value / top) * (HEIGHT - 6);
    const nodes = [0, top / 2, top].map((value) => svg("line", { class: "rule", x1: 0, x2: WIDTH, y1: y(value), y2: y(value) }));
    this.#names.forEach((_, i) => {
      for (const run of this.#runs(i)) {
        const line = run.map((point) => `${x(point.time).toFixed(1)} ${y(point.values[i]).toFixed(1)}`).join("L");
        const base = HEIGHT - 1;
        if (i === 0) nodes.push(svg("path", { class: "area", d: `M${x(run[0].time)} ${base}L${line}L${x(run.at(-1).time)} ${base}Z` }));
        nodes.push(svg("path", { class: `line s${i + 1}`, d: `M${line}` }));
      }
    });
    this.#svg.replaceChildren(...nodes);
    const [text, unit] = this.#format(top);
    this.#top.textContent = `${text} ${unit}`.trim();
    this.#since.textContent = span < 120 ? `${Math.round(span)} s ago` : `${Math.round(span / 60)} min ago`;
  }

  /** The stretches without a gap. */
  #runs(series) {
    const runs = [];
    let run = [];
    for (const point of this.#points) {
      if (point.values[series] == null) {
        if (run.length > 1) runs.push(run);
        run = [];
      } else {
        run.push(point);
      }
    }
    if (run.length > 1) runs.push(run);
    return runs;
  }
}

function niceCeiling(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((ceiling) => ceiling >= value * 0.999);
}

/** The value below which this share of a histogram's observations lies, linear inside a bucket; null if it is empty. */
export function quantile({ bounds, counts }, share) {
  const total = counts.reduce((sum, count) => sum + count, 0);
  if (!total) return null;
  let left = share * total;
  for (let i = 0; i < counts.length; i++) {
    if (left <= counts[i] && counts[i]) {
      const low = i ? bounds[i - 1] : 0;
      const high = bounds[i] ?? bounds.at(-1);
      return low + (high - low) * (left / counts[i]);
    }
    left -= counts[i];
  }
  return bounds.at(-1);
}
