// All pages work without this. It keeps them up to date and saves some steps.
import { morph } from "./morph.js";

const byId = (id) => document.getElementById(id);

// Times as how far away they are, updated every second.

function span(seconds) {
  const units = [["d", 86400], ["h", 3600], ["m", 60], ["s", 1]];
  const first = units.findIndex(([, size]) => seconds >= size);
  if (first < 0) return "0s";
  const [unit, size] = units[first];
  const text = Math.floor(seconds / size) + unit;
  if (first >= 2) return first === 2 ? minutes(seconds) : text;
  const [below, smaller] = units[first + 1];
  const rest = Math.floor((seconds % size) / smaller);
  return rest ? `${text} ${rest}${below}` : text;
}

function minutes(seconds) {
  const rest = Math.floor(seconds % 60);
  return Math.floor(seconds / 60) + "m" + (rest ? ` ${rest}s` : "");
}

function tick() {
  for (const time of document.querySelectorAll("time[data-away]")) {
    const away = (Date.parse(time.dateTime) - Date.now()) / 1000;
    const text = away < 0 ? `${span(-away)} ago` : `in ${span(away)}`;
    if (time.textContent !== text) time.textContent = text;
  }
}
setInterval(tick, 1000);
tick();

// Times in the reader's zone: the server knows only UTC.

const zoneName = (at) => new Intl.DateTimeFormat("en", { timeZoneName: "short" }).formatToParts(at).find((each) => each.type === "timeZoneName").value;

function local(text, form) {
  const at = new Date(text), two = (value) => String(value).padStart(2, "0");
  const clock = `${two(at.getHours())}:${two(at.getMinutes())}`;
  const day = `${at.toLocaleString("en", { month: "short" })} ${two(at.getDate())}`;
  if (form !== "full") return form === "day" ? day : clock;
  return `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())} ${clock}:${two(at.getSeconds())} ${zoneName(at)}`;
}

function zones() {
  for (const time of document.querySelectorAll("time[data-zone]")) time.textContent = local(time.dateTime, time.dataset.zone);
  for (const time of document.querySelectorAll("time[data-away]")) time.title = local(time.dateTime, "full");
  for (const title of document.querySelectorAll("title[data-at]")) title.textContent = title.dataset.before + local(title.dataset.at, "full");
  for (const name of document.querySelectorAll("[data-zone-name]")) name.textContent = zoneName(new Date());
}
zones();

// Light and dark: a cookie keeps the choice, so that the server renders it.

const themeSwitch = byId("theme-switch");
if (themeSwitch) {
  themeSwitch.hidden = false;
  themeSwitch.addEventListener("click", () => {
    const root = document.documentElement;
    const dark = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
    root.dataset.theme = (root.dataset.theme || dark) === "dark" ? "light" : "dark";
    document.cookie = `delayed_theme=${root.dataset.theme}; path=${themeSwitch.dataset.path}; max-age=31536000; samesite=strict`;
  });
}

// Live updates: the server sends the present content of the page.

const live = byId("live");
const liveSwitch = byId("live-switch");
const trouble = byId("trouble");

const SILENT_SECONDS = 25;

class Live {
  constructor() {
    this.paused = false;
    this.knownAt = new Date();
    liveSwitch.hidden = false;
    liveSwitch.addEventListener("click", () => {
      this.paused = !this.paused;
      this.follow();
    });
    // A hidden page holds no connection: browsers allow only a few.
    document.addEventListener("visibilitychange", () => this.follow());
    this.follow();
  }

  follow() {
    this.source?.close();
    this.source = null;
    this.wait(0);
    if (this.paused) this.say("Paused", "");
    if (this.paused || document.hidden) return;
    if (live.classList.contains("old")) this.fail(this.why);
    else this.say("Live", "");
    this.heard();
    this.source = new EventSource(live.dataset.live);
    this.source.addEventListener("look", (event) => this.show(JSON.parse(event.data)));
    this.source.addEventListener("trouble", (event) => {
      this.heard();
      this.fail(JSON.parse(event.data));
    });
    this.source.addEventListener("error", () => {
      if (this.source.readyState === EventSource.CLOSED) {
        this.fail("The server has refused");
        this.wait(3, () => this.retry());
      } else {
        // The server also ends a stream now and then, and the browser reconnects at once.
        this.lost ??= setTimeout(() => this.fail("The server does not answer"), 5000);
      }
    });
    this.source.addEventListener("open", () => this.heard());
  }

  // The server sends something at least every 15 seconds. A connection that is silent for longer is
  // reopened: nothing else ends it when the network is gone, or the computer has slept.
  heard() {
    this.wait(SILENT_SECONDS, () => {
      this.fail("The server does not answer");
      this.follow();
    });
  }

  wait(seconds, then) {
    clearTimeout(this.timer);
    clearTimeout(this.lost);
    this.lost = null;
    this.timer = seconds ? setTimeout(then, seconds * 1000) : null;
  }

  async retry() {
    const answer = await fetch(location.href, { method: "HEAD", redirect: "manual" }).catch(() => null);
    if (answer?.type === "opaqueredirect") location.reload(); // the login has ended
    else this.follow();
  }

  show(html) {
    this.heard();
    this.knownAt = new Date();
    const fresh = new DOMParser().parseFromString(`<div>${html}</div>`, "text/html").body.firstChild;
    const focused = document.activeElement;
    morph(live, fresh);
    // A node that is moved loses the focus.
    if (focused !== document.activeElement && live.contains(focused)) focused.focus({ preventScroll: true });
    document.dispatchEvent(new Event("shown"));
    tick();
    zones();
    live.classList.remove("old");
    this.say("Live", "");
  }

  fail(text) {
    this.why = text;
    live.classList.add("old");
    this.say("Offline", `${text}. What is here was known at ${this.knownAt.toLocaleTimeString()}; trying again.`);
  }

  say(word, text) {
    liveSwitch.querySelector(".word").textContent = word;
    liveSwitch.dataset.state = word.toLowerCase();
    liveSwitch.setAttribute("aria-pressed", String(!this.paused));
    if (trouble.textContent !== text) trouble.textContent = text;
  }
}
if (live?.dataset.live && liveSwitch) new Live();

// Selecting several rows.

const choose = document.querySelector("form.choose");
if (choose) {
  const boxes = () => [...choose.querySelectorAll("td.pick input")];
  const all = byId("all-match");
  const buttons = choose.querySelectorAll("button[name=verb]");
  const count = () => {
    const found = boxes(), page = byId("select-page");
    const chosen = found.filter((each) => each.checked).length;
    for (const each of found) each.disabled = Boolean(all?.checked);
    if (page) {
      page.parentNode.hidden = !found.length;
      page.checked = chosen > 0 && chosen === found.length;
      page.indeterminate = chosen > 0 && chosen < found.length;
      page.disabled = Boolean(all?.checked);
    }
    byId("selected").textContent = all?.checked ? "" : `${chosen} selected`;
    for (const each of buttons) each.disabled = !all?.checked && !chosen;
  };
  choose.addEventListener("change", (event) => {
    if (event.target.id === "select-page") for (const each of boxes()) each.checked = event.target.checked;
    count();
  });
  let last = null;
  choose.addEventListener("click", (event) => {
    if (!event.target.matches("td.pick input")) return;
    const found = boxes();
    if (event.shiftKey && found.includes(last)) {
      const [from, to] = [found.indexOf(last), found.indexOf(event.target)].sort((a, b) => a - b);
      for (const one of found.slice(from, to + 1)) one.checked = event.target.checked;
    }
    last = event.target;
    count();
  });
  document.addEventListener("shown", count);
  window.addEventListener("pageshow", count);
  count();
}

// The result of a form is shown once, and not again when its address is opened.

const address = new URL(location);
if (address.searchParams.has("done")) {
  for (const name of ["done", "count", "among"]) address.searchParams.delete(name);
  history.replaceState(history.state, "", address);
}

// A page that could not be shown is reloaded as soon as it can be.

if (byId("again")) {
  const retry = async () => {
    const answer = await fetch(location.href, { method: "HEAD" }).catch(() => null);
    if (answer && ![429, 502, 503, 504].includes(answer.status)) location.reload();
    else setTimeout(retry, 3000);
  };
  setTimeout(retry, 3000);
}
