// The reader that BentoML ships, without the tracking of BentoML's own page.
window.SwaggerUIBundle({
  url: "docs.json",
  dom_id: "#swagger-ui",
  deepLinking: true,
  // The default asks a host on the internet whether the document is valid.
  validatorUrl: null,
});
