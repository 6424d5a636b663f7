// Replaces the parts of an overview as the server sends them. The server has escaped them; the page's
// Content-Security-Policy allows no script but this file.
"use strict";

(() => {
  const live = document.querySelector("[data-live]");
  if (!live || !window.EventSource) return;
  const connection = document.getElementById("connection");
  const say = (text) => { if (connection) connection.textContent = text; };
  const parser = new DOMParser();

  const show = (name, html) => {
    const part = [...live.querySelectorAll("[data-part]")].find((one) => one.dataset.part === name);
    if (!part) return;
    part.replaceChildren(...parser.parseFromString(html, "text/html").body.childNodes);
  };

  let source = null;
  const open = () => {
    if (source) return;
    source = new EventSource(live.dataset.live);
    source.addEventListener("open", () => say("live"));
    source.addEventListener("error", () => say("not connected; trying again"));
    source.addEventListener("parts", (event) => {
      for (const [name, html] of Object.entries(JSON.parse(event.data))) show(name, html);
    });
  };
  const close = () => {
    if (source) source.close();
    source = null;
    say("paused");
  };
  document.addEventListener("visibilitychange", () => (document.hidden ? close() : open()));
  window.addEventListener("pagehide", close);
  open();
})();
