// The list of models: which one is chosen, and how far it is while it is being loaded.
import { getJson } from "./api.js";
import { byId, element } from "./dom.js";

const RETRY_MS = 2000;
const LOADING_MS = 500;

export class Models {
  #picker = byId("model");
  #note = byId("loading");
  #cards = [];
  #wanted = ""; // chosen by the user or by a conversation, perhaps before the list is here
  #timer = null;
  #problem = ""; // why the list cannot be had
  #onCards;
  #onError;

  /**
   * onCards(card): the models are known, card is that of the chosen one. onError(error): they cannot be asked for;
   * returns why, in words.
   */
  constructor({ onCards, onError }) {
    this.#onCards = onCards;
    this.#onError = onError;
    this.#picker.addEventListener("change", () => {
      this.#wanted = this.chosen;
      this.#load();
    });
  }

  /** The chosen model's id; "" before the list is here. */
  get chosen() {
    return this.#picker.value;
  }

  /** Chooses a model if the server has it. id: "" keeps the choice. */
  choose(id) {
    if (id) this.#wanted = id;
    if (this.#card(this.#wanted)) this.#picker.value = this.#wanted;
    this.#show();
  }

  /** The chosen model's entry in /v1/models. */
  get card() {
    return this.#card(this.chosen);
  }

  #card(id) {
    return this.#cards.find((card) => card.id === id);
  }

  /** Asks the server for its models, again and again while the chosen one is being loaded. Returns whether it has them. */
  async refresh() {
    clearTimeout(this.#timer);
    try {
      this.#cards = (await getJson("/v1/models")).data;
    } catch (error) {
      this.#problem = this.#onError(error);
      this.#show();
      if (error.status !== 401) this.#refreshIn(RETRY_MS);
      return false;
    }
    this.#problem = "";
    this.#picker.replaceChildren(...this.#cards.map((card) => element("option", { value: card.id }, card.id)));
    this.choose("");
    this.#onCards(this.card);
    if (this.card?.state === "loading") this.#refreshIn(LOADING_MS);
    return true;
  }

  /** Waits while a model is being loaded. id: undefined for the chosen one. Returns whether it is loaded at the end. */
  async loaded(id, signal) {
    const state = () => this.#card(id ?? this.chosen)?.state;
    do {
      await new Promise((resolve) => setTimeout(resolve, LOADING_MS));
      signal.throwIfAborted();
      await this.refresh();
    } while (state() === "loading");
    return state() === "loaded";
  }

  #refreshIn(milliseconds) {
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.refresh(), milliseconds);
  }

  /** Loads the model that was just chosen, so that the first question need not wait for it. */
  #load() {
    this.#onCards(this.card);
    this.#show();
    if (this.card.state === "loaded") return;
    const path = `/v1/models/${this.card.id.split("/").map(encodeURIComponent).join("/")}/load`;
    const done = () => this.refresh(); // a failure's reason is in the model's entry
    getJson(path, { method: "POST" }).then(done, done);
    this.#refreshIn(LOADING_MS);
  }

  #show() {
    const { card } = this;
    const isLoading = card?.state === "loading" && !this.#problem;
    const hasFailed = card?.state === "unloaded" && card.reason !== null;
    const problem = this.#problem || (hasFailed ? `${card.id} could not be loaded: ${card.reason}` : "");
    this.#note.hidden = !isLoading && !problem;
    this.#note.classList.toggle("is-problem", problem !== "");
    if (isLoading) {
      const { phase, done, total } = card.loading;
      const share = total ? done / total : null;
      const text = `Loading ${card.id}: ${phase}${share === null ? "" : `, ${Math.floor(100 * share)} %`}`;
      const bar = element("progress", share === null ? {} : { value: share });
      bar.setAttribute("aria-label", `Loading ${card.id}`);
      this.#note.removeAttribute("role");
      this.#note.replaceChildren(element("span", {}, text), bar);
    } else {
      this.#note.setAttribute("role", "alert");
      this.#note.replaceChildren(...(problem ? [element("span", {}, problem)] : []));
    }
  }
}
