"""Pre-trained feature extractors: ONNX graphs from pixels to one vector per image, which are never trained here."""

TRUNKS = {
    "efficientnet-lite0": "models.trunks.efficientnet_lite:open_lite",
    "efficientnet-lite1": "models.trunks.efficientnet_lite:open_lite",
    "efficientnet-lite2": "models.trunks.efficientnet_lite:open_lite",
}
"""The name of a trunk, or the part before the colon of `kind:name` -> "module:function" that opens it.

The function takes a `models.trunks.trunk.TrunkRequest` and returns a `Trunk`. It is imported when it is first used.
"""
DEFAULT_TRUNK = "efficientnet-lite0"
