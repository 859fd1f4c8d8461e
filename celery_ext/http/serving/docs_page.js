"use strict";
// Shows openapi.json. Text is always set as text and never parsed as HTML.
function make(tag, text, ...children) {
  const made = document.createElement(tag);
  if (text) made.textContent = text.replaceAll("`", "");
  made.append(...children);
  return made;
}
function row(...cells) {
  return make("tr", "", ...cells.map((cell) => make("td", cell)));
}
function typeOf(schema) {
  if (!schema) return "";
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.anyOf) return schema.anyOf.map(typeOf).join(" or ");
  if (schema.enum) return schema.enum.map((each) => JSON.stringify(each)).join(", ");
  if (schema.type === "array") return "list of " + (typeOf(schema.items) || "anything");
  return schema.format || schema.type || "anything";
}
function fields(schema) {
  const table = make("table");
  const required = new Set(schema.required || []);
  for (const [name, of] of Object.entries(schema.properties || {})) {
    table.append(row(name, typeOf(of) + (required.has(name) ? ", required" : ""), of.description || ""));
  }
  return table;
}
function operation(api, path, method, of) {
  const head = make("summary", "", make("span", method.toUpperCase()), make("code", path), make("span", of.summary));
  head.firstChild.className = "method";
  const body = make("div", "", make("p", "Scope: " + of["x-scope"]));
  if (of.parameters.length) {
    const table = make("table");
    for (const each of of.parameters) table.append(row(each.name, each.in, typeOf(each.schema)));
    body.append(make("h4", "Parameters"), table);
  }
  for (const [type, content] of Object.entries((of.requestBody || {}).content || {})) {
    body.append(make("h4", "Body: " + type + ", " + (content.schema.description || typeOf(content.schema))));
  }
  const answers = make("table");
  for (const [status, answer] of Object.entries(of.responses)) {
    const types = Object.values(answer.content || {}).map((each) => typeOf(each.schema));
    answers.append(row(status, types.join(", "), answer.description));
  }
  body.append(make("h4", "Answers"), answers);
  return make("details", "", head, body);
}
async function show() {
  const api = await (await fetch("openapi.json")).json();
  const main = document.getElementById("main");
  main.replaceChildren(make("h1", api.info.title + " " + api.info.version), make("p", api.info.description));
  const link = make("a", "openapi.json");
  link.href = "openapi.json";
  main.append(make("p", "", link));
  for (const [path, methods] of Object.entries(api.paths)) {
    for (const [method, of] of Object.entries(methods)) main.append(operation(api, path, method, of));
  }
  main.append(make("h2", "Schemas"));
  for (const [name, schema] of Object.entries(api.components.schemas)) {
    main.append(make("details", "", make("summary", name), make("div", "", make("p", schema.description || ""), fields(schema))));
  }
}
show().catch((error) => document.getElementById("main").replaceChildren(make("p", String(error))));
