(() => {
  "use strict";
  document.documentElement.classList.add("js");
  try {
    const kept = localStorage.getItem("ppas-theme");
    if (kept === "light" || kept === "dark") document.documentElement.dataset.theme = kept;
  } catch { /* storage is closed to this page: follow the system */ }
})();
