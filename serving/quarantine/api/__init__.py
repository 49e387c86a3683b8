"""The quarantine over HTTP, for labelling; the admin token is needed."""
