// Several versions of the site lie in folders beside each other, with a versions.js that lists the folders:
// `var VERSIONS = ["dev", "0.1.0"];`. Without that file there is one version, and no choice. Browsers read a
// script from file://, too, where they refuse to fetch a list.
"use strict";
{
  const select = document.currentScript.parentElement.querySelector("select");
  const top = new URL(document.documentElement.dataset.content_root, location.href);
  const home = document.documentElement.lang.startsWith("zh") ? "zh/index.html" : "index.html";
  for (const name of window.VERSIONS || []) {
    const address = new URL(`../${name}/`, top).href;
    select.add(new Option(name, address + home, false, address === top.href));
    select.hidden = false;
  }
  select.addEventListener("change", () => location.assign(select.value));
}
