"""Makes transformers' Auto classes know norm-aligned LLaVA."""

import transformers
from packaging.version import Version

SUPPORTED_TRANSFORMERS = "4.57.6 (and later 4.57 releases), or 5.17 and later"


def require_supported_transformers(version: str) -> None:
    """Raise ImportError for a transformers `version` that this package was not built for."""
    found = Version(version)
    if not Version("4.57.6") <= found < Version("4.58") and found < Version("5.17.0"):
        raise ImportError(
            f"transformers {version} is installed, but llava-norm-align works with {SUPPORTED_TRANSFORMERS}. "
            "Install one of them: pip install 'transformers==4.57.6' or pip install 'transformers>=5.17'."
        )


def register() -> None:
    """Register with AutoConfig, AutoModel, AutoModelForImageTextToText and, in 4.57, AutoModelForVision2Seq."""
    require_supported_transformers(transformers.__version__)

    from llava_norm_align.modeling import FAMILIES

    for cls in FAMILIES.values():
        config_class = cls.config_class
        transformers.AutoConfig.register(config_class.model_type, config_class)
        transformers.AutoModel.register(config_class, cls.model_class)
        transformers.AutoModelForImageTextToText.register(config_class, cls)
        if Version(transformers.__version__) < Version("5"):
            transformers.AutoModelForVision2Seq.register(config_class, cls)
