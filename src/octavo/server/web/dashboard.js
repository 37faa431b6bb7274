// The dashboard: asks once a second for totals and shows their differences, after those of the last 15 minutes.
import { ServerError, getJson, setApiKey } from "./api.js";
import { Chart, quantile } from "./charts.js";
import { byId, element } from "./dom.js";

const INTERVAL_MS = 1000;
const SPAN_S = 900;
const RATE_WINDOW_S = 3;
const LATENCY_WINDOW_S = 30;

const number = new Intl.NumberFormat("en");
const plain = (value) => [number.format(Math.round(value * 10) / 10), ""];
const perSecond = (value) => [number.format(value < 10 ? Math.round(value * 10) / 10 : Math.round(value)), "tokens/s"];
const percent = (value) => [String(Math.round(value)), "%"];

function duration(value) {
  if (value < 0.001) return ["<1", "ms"];
  if (value < 1) return [String(Math.round(value * 1000)), "ms"];
  return [value < 10 ? value.toFixed(2) : value.toFixed(1), "s"];
}

const latency = { names: ["p50", "p95", "p99"], span: SPAN_S, format: duration };
const charts = {
  requests: new Chart({ title: "Requests", names: ["running", "waiting"], span: SPAN_S, format: plain, least: 4 }),
  tokens: new Chart({ title: "Tokens", names: ["generated", "prompt"], span: SPAN_S, format: perSecond, least: 10 }),
  cache: new Chart({ title: "KV cache in use", names: ["used"], span: SPAN_S, format: percent, least: 100 }),
  firstToken: new Chart({ ...latency, title: "Time to first token", least: 0.1 }),
  interToken: new Chart({ ...latency, title: "Time between tokens", least: 0.02 }),
  total: new Chart({ ...latency, title: "Total request time", least: 1 }),
};
byId("charts").append(...Object.values(charts).map((chart) => chart.node));

let samples = []; // { time, uptime, model }, of the model that is shown
let shownModel = null;

async function tick() {
  try {
    show(await getJson(samples.length ? "/dashboard/data" : "/dashboard/data?history=true"));
  } catch (error) {
    if (!(error instanceof ServerError)) throw error;
    byId("key-form").hidden = error.status !== 401;
    if (error.status === 401 && byId("key").value === "") byId("key").focus();
    setState(error.status === 401 ? "Locked" : "Unreachable", "bad");
    byId("notice").hidden = error.status === 401;
    byId("notice").textContent = error.text;
  }
}

function show(data) {
  byId("key-form").hidden = byId("notice").hidden = true;
  if (samples.length && data.uptime_s < samples.at(-1).uptime) forget(); // another server has begun
  const model = data.models.find((candidate) => candidate.name === shownModel) ?? data.models[0];
  showModels(data.models, model);
  if (model.name !== shownModel) {
    shownModel = model.name;
    forget();
  }
  if (!samples.length) replay(data.history ?? []);
  keep(data, model);
  setState(STATES[model.state] ?? model.state, colourOf(model.state));
  if (model.reason) {
    byId("notice").hidden = false;
    byId("notice").textContent = model.reason;
  }
  note(data.time_s, model);
  showTotals(data, model);
}

/** Puts what the server has kept into the charts, which are drawn with the figures of now. */
function replay(history) {
  for (const past of history) {
    const model = past.models.find((candidate) => candidate.name === shownModel);
    if (!model) continue;
    keep(past, model);
    note(past.time_s, model, false);
  }
}

function keep(data, model) {
  samples.push({ time: data.time_s, uptime: data.uptime_s, model });
  while (samples[0].time < data.time_s - Math.max(RATE_WINDOW_S, LATENCY_WINDOW_S) - 1) samples.shift();
}

function forget() {
  samples = [];
  for (const chart of Object.values(charts)) chart.clear();
}

function note(now, model, isDrawn = true) {
  charts.requests.push(now, [model.num_running, model.num_waiting], [
    number.format(model.num_running),
    model.max_num_seqs ? `of ${model.max_num_seqs} running` : "running",
  ], isDrawn);
  charts.tokens.push(now, [rate("num_generated_tokens"), rate("num_prompt_tokens")], null, isDrawn);
  const used = model.num_blocks ? (100 * model.num_used_blocks) / model.num_blocks : 0;
  const numTokens = number.format(model.num_cache_tokens);
  charts.cache.push(now, [used], [String(Math.round(used)), model.num_blocks ? `% of ${numTokens} tokens` : "%"], isDrawn);
  for (const [chart, name] of [
    [charts.firstToken, "time_to_first_token"],
    [charts.interToken, "inter_token_latency"],
    [charts.total, "e2e_latency"],
  ]) {
    const recent = recentHistogram(name);
    const values = [0.5, 0.95, 0.99].map((share) => quantile(recent, share));
    const [text, unit] = values[0] === null ? ["–", ""] : duration(values[0]);
    chart.push(now, values, [text, unit && `${unit} median`], isDrawn);
  }
}

function sampleBefore(seconds) {
  const now = samples.at(-1).time;
  return samples.findLast((sample) => sample.time <= now - seconds) ?? samples[0];
}

function rate(name) {
  const before = sampleBefore(RATE_WINDOW_S);
  const now = samples.at(-1);
  return now.time > before.time ? (now.model[name] - before.model[name]) / (now.time - before.time) : 0;
}

/** What was observed in the last seconds. */
function recentHistogram(name) {
  const { bounds, counts } = samples.at(-1).model[name];
  const before = sampleBefore(LATENCY_WINDOW_S).model[name].counts;
  return { bounds, counts: counts.map((count, i) => count - before[i]) };
}

const STATES = {
  ready: "Ready",
  loaded: "Ready",
  loading: "Loading",
  unloading: "Unloading",
  sleeping: "Sleeping",
  unloaded: "Not loaded",
  restarting: "Restarting",
  stalled: "Stalled",
  dead: "Stopped",
};

/** colour: good, bad, or neither. */
function setState(text, colour) {
  const node = byId("state");
  if (node.textContent !== text) node.textContent = text; // a screen reader hears changes only
  node.className = `state is-${colour}`;
}

function colourOf(state) {
  if (STATES[state] === "Ready") return "good";
  return ["restarting", "stalled", "dead"].includes(state) ? "bad" : "neutral";
}

function showModels(models, current) {
  const group = byId("models");
  group.hidden = models.length < 2;
  const names = models.map((model) => model.name).join("\n");
  if (group.dataset.names !== names) {
    group.dataset.names = names;
    group.replaceChildren(
      ...models.map((model) => {
        const button = element("button", { type: "button" }, model.name);
        button.addEventListener("click", () => {
          forget();
          shownModel = model.name;
          tick();
        });
        return button;
      }),
    );
  }
  for (const button of group.children) button.setAttribute("aria-pressed", String(button.textContent === current.name));
}

function sum(counts) {
  return Object.values(counts).reduce((total, count) => total + count, 0);
}

function showTotals(data, model) {
  const cached = model.num_prompt_tokens ? Math.round((100 * model.num_cached_tokens) / model.num_prompt_tokens) : 0;
  const entries = [
    ["Uptime", age(data.uptime_s)],
    ["Answers", number.format(sum(model.finished) - (model.finished.abort ?? 0) - (model.finished.error ?? 0))],
    ["Cancelled", number.format(sum(model.cancelled))],
    ["Refused", number.format(sum(data.rejected))],
    ["Server errors", number.format(data.num_http_errors)],
    ["Generated tokens", number.format(model.num_generated_tokens)],
    ["Prompt tokens", number.format(model.num_prompt_tokens)],
    ["Prefix cache hits", `${cached} %`],
    ["Engine restarts", number.format(model.num_restarts)],
    ["Engine memory", `${number.format(Math.round(model.resident_bytes / 2 ** 20))} MiB`],
  ];
  byId("totals").replaceChildren(
    ...entries.map(([name, text]) => element("div", {}, element("dt", {}, name), element("dd", {}, text))),
  );
}

function age(seconds) {
  const minutes = Math.floor(seconds / 60);
  if (minutes < 1) return `${Math.floor(seconds)} s`;
  if (minutes < 60) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} days`;
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setApiKey(byId("key").value.trim());
  tick();
});

/** One request at a time, and none while nobody looks. */
async function loop() {
  const start = performance.now();
  if (!document.hidden) await tick();
  setTimeout(loop, Math.max(0, INTERVAL_MS - (performance.now() - start)));
}

loop();
