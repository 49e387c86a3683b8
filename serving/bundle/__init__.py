"""The bundle format, image decoding and the decision rule. No HTTP, no torch, nothing else of serving."""
