// Shows the OpenAPI document with the Swagger UI that BentoML ships, without the tracking and the badges from other hosts
// on BentoML's own page.

const api = await (await fetch("docs.json")).json();
api.info.description = (api.info.description ?? "").replaceAll(/!\[[^\]]*\]\([^)]*\)/g, "");

window.SwaggerUIBundle({
  spec: api,
  dom_id: "#swagger-ui",
  deepLinking: true,
  docExpansion: "list",
  defaultModelsExpandDepth: 0,
  // The default would send the document to a host on the internet for validation.
  validatorUrl: null,
});
