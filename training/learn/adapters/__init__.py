"""Adapters: small masked networks on the encoded vectors of a trunk, one task after another by HAT+CSI or Sup+CSI."""
