// Loaded before the page is drawn, so that the chosen theme never flashes the other one.
(() => {
  const KEY = "octavo.theme";
  const root = document.documentElement;

  function stored() {
    try {
      return localStorage.getItem(KEY);
    } catch {
      return null; // storage is forbidden: follow the system
    }
  }

  function isDark() {
    const choice = root.dataset.theme;
    return choice ? choice === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  }

  function describe(button) {
    const other = isDark() ? "light" : "dark";
    button.setAttribute("aria-label", `Use the ${other} theme`);
    button.title = `Use the ${other} theme`;
  }

  const choice = stored();
  if (choice === "light" || choice === "dark") root.dataset.theme = choice;

  document.addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme");
    describe(button);
    button.addEventListener("click", () => {
      root.dataset.theme = isDark() ? "light" : "dark";
      try {
        localStorage.setItem(KEY, root.dataset.theme);
      } catch {
        // it holds until the page is left
      }
      describe(button);
      document.dispatchEvent(new Event("themechange"));
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      describe(button);
      document.dispatchEvent(new Event("themechange"));
    });
  });
})();
