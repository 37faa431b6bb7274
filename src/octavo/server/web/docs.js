// The API page: Swagger UI over the server's OpenAPI document. Behind a key, a form asks for it first.
import { ServerError, apiKey, getJson, setApiKey } from "./api.js";
import { byId } from "./dom.js";

async function load() {
  let spec;
  try {
    spec = await getJson("/openapi.json");
  } catch (error) {
    if (!(error instanceof ServerError)) throw error;
    refuse(error);
    return;
  }
  byId("key-form").hidden = byId("notice").hidden = true;
  const { SwaggerUIBundle } = window;
  SwaggerUIBundle({
    spec,
    domNode: byId("viewer"),
    presets: [SwaggerUIBundle.presets.apis],
    requestInterceptor: withKey,
    deepLinking: true,
    defaultModelsExpandDepth: 0,
    displayRequestDuration: true,
    docExpansion: "none",
    tryItOutEnabled: true,
    validatorUrl: null,
  });
}

/** A wrong key is forgotten only when another takes its place: the server may have been restarted with another one. */
function refuse(error) {
  const isLocked = error.status === 401;
  byId("key-form").hidden = !isLocked;
  byId("notice").hidden = isLocked && !apiKey();
  byId("notice").textContent = isLocked ? "The server does not accept this API key." : error.text;
  if (isLocked) byId("key").focus();
}

/** Sends the key of this page. */
function withKey(request) {
  if (apiKey()) request.headers.Authorization = `Bearer ${apiKey()}`;
  return request;
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setApiKey(byId("key").value.trim());
  load();
});

/** Swagger UI is dark by a class, whereas the page follows the system unless the toggle was used. */
function followTheme() {
  const choice = document.documentElement.dataset.theme;
  const isDark = choice ? choice === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.classList.toggle("dark-mode", isDark);
}
document.addEventListener("themechange", followTheme);
followTheme();
load();
