"""Feature extractors that are never trained here: ONNX graphs from pixels to one vector per image."""

TRUNKS = {
    "efficientnet-lite0": "models.trunks.efficientnet_lite:open_lite",
    "efficientnet-lite1": "models.trunks.efficientnet_lite:open_lite",
    "efficientnet-lite2": "models.trunks.efficientnet_lite:open_lite",
    "patches": "models.trunks.patches:open_patches",
    "torchvision:NAME": "models.trunks.torch_networks:open_torchvision",
    "timm:NAME": "models.trunks.torch_networks:open_timm",
    "onnx:FILE": "models.trunks.onnx_file:open_onnx",
}
"""The name of a trunk, or the form of the names of a kind of trunks -> "module:function" that opens it.

The function takes a `models.trunks.trunk.TrunkRequest` and returns a `Trunk`. It is imported when it is first used.
"""
DEFAULT_TRUNK = "efficientnet-lite0"
