// The reader that BentoML ships, without the tracking and the badges from other hosts on BentoML's own page.

const api = await (await fetch("docs.json")).json();
api.info.description = (api.info.description ?? "").replaceAll(/!\[[^\]]*\]\([^)]*\)/g, "");

window.SwaggerUIBundle({
  spec: api,
  dom_id: "#swagger-ui",
  deepLinking: true,
  // The default asks a host on the internet whether the document is valid.
  validatorUrl: null,
});
