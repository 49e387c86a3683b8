"""Feature extractors, built from the layers of any mask mechanism."""

from models.registry import Registry

BACKBONES = Registry(
    "backbone",
    {
        "convnet": "models.backbones.convnet:convnet",
        "resnet18": "models.backbones.resnet:resnet18",
        "adapter": "models.backbones.adapter:adapter",
    },
)
"""`NetworkConfig.backbone` -> a function (mechanism, input units, config) -> models.backbones.backbone.Backbone."""
