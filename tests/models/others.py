"""Small models of open_clip, segmentation_models_pytorch, monai, kornia and ultralytics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.models.small import Small

_ENCODERS = """
densenet=densenet121 dpn=dpn68 efficientnet=efficientnet-b0 inceptionresnetv2=inceptionresnetv2 inceptionv4=inceptionv4
mit=mit_b0 mobilenet=mobilenet_v2 mobileone=mobileone_s0 resnet=resnet18 resnext=resnext50_32x4d senet=se_resnet50
timm_efficientnet=timm-efficientnet-b0 timm_sknet=timm-skresnet18 timm_universal=tu-test_resnet vgg=vgg11_bn xception=xception
"""
_DECODERS = """
UnetPlusPlus=resnet18 MAnet=mobilenet_v2 Linknet=mobilenet_v2 FPN=resnet18 PSPNet=resnet18 PAN=resnet18 DeepLabV3=resnet18
DeepLabV3Plus=resnet18 UPerNet=tu-test_convnext Segformer=mit_b0
"""


def _segmentation(decoder: str, encoder: str) -> Small:
    settings = {"encoder_name": encoder, "encoder_weights": None, "classes": 2}
    sizes = {"height": 128, "width": 160} if decoder == "PAN" else {"height": 64, "width": 96}
    return Small(f"segmentation_models_pytorch:{decoder}", "x: batch 3 height width", settings, sizes)


def _pairs(text: str) -> dict[str, str]:
    return dict(pair.split("=") for pair in text.split())


#: Each encoder family with a U-Net, and each further decoder.
SEGMENTATION_MODELS: Mapping[str, Small] = {
    **{f"encoder {family}": _segmentation("Unet", encoder) for family, encoder in _pairs(_ENCODERS).items()},
    **{decoder: _segmentation(decoder, encoder) for decoder, encoder in _pairs(_DECODERS).items()},
    "DPT": Small(
        "segmentation_models_pytorch:DPT",
        "x: batch 3 224 224",
        {"encoder_name": "tu-vit_tiny_patch16_224", "encoder_weights": None, "classes": 2},
    ),
}

_VISION: dict[str, Any] = {"layers": 2, "width": 32, "head_width": 8, "patch_size": 8, "image_size": 32}
_TEXTS: dict[str, Any] = {"context_length": 12, "vocab_size": 99, "width": 32, "heads": 4, "layers": 2}
_PAIR, _PAIR_OF_ANY_LENGTH = (f"image: batch 3 32 32; text: batch {length} < 99" for length in (12, "text"))


def _clip(
    vision: Mapping[str, Any] = {},
    text: Mapping[str, Any] = {},
    name: str = "CLIP",
    inputs: str = _PAIR,
    **settings: Any,
) -> Small:
    towers = {"vision_cfg": {**_VISION, **vision}, "text_cfg": {**_TEXTS, **text}}
    return Small(f"open_clip:{name}", inputs, {"embed_dim": 16, **towers, **settings})


#: The towers of open_clip's configurations.
OPEN_CLIP: Mapping[str, Small] = {
    "ViT": _clip(),
    "ViT-quickgelu": _clip(quick_gelu=True),
    "ViT-average": _clip(
        {"pool_type": "avg", "final_ln_after_pool": True}, {"pool_type": "last", "no_causal_mask": True}
    ),
    "CLIPA": _clip({"pool_type": "avg", "pos_embed_type": "sin_cos_2d"}, {"no_causal_mask": True, "pool_type": "last"}),
    "RN": _clip({"layers": [1, 1, 1, 1], "width": 16}),
    "EVA02": _clip(
        {"timm_model_name": "test_vit", "timm_pool": "token"},
        name="CustomTextCLIP",
        inputs="image: batch 3 160 160; text: batch 12 < 99",
    ),
    "SigLIP": _clip(
        {"attentional_pool": True, "attn_pooler_queries": 4, "attn_pooler_heads": 4},
        {"pool_type": "last", "no_causal_mask": True, "proj_bias": True},
        name="CustomTextCLIP",
        inputs=_PAIR_OF_ANY_LENGTH,
        init_logit_bias=-10.0,
    ),
    "convnext": _clip(
        {"timm_model_name": "test_convnext", "timm_pool": "", "timm_proj": "linear"}, name="CustomTextCLIP"
    ),
    "custom blocks": _clip(
        {"qk_norm": True, "scale_attn": True, "scale_fc": True}, {"qk_norm": True, "scale_heads": True}
    ),
    "CoCa": Small(
        "open_clip:CoCa",
        _PAIR_OF_ANY_LENGTH,
        {
            "embed_dim": 32,
            "vision_cfg": {
                **_VISION,
                "attentional_pool": True,
                "attn_pooler_queries": 4,
                "attn_pooler_heads": 4,
                "output_tokens": True,
            },
            "text_cfg": {**_TEXTS, "embed_cls": True, "output_tokens": True},
            "multimodal_cfg": {**_TEXTS, "attn_pooler_heads": 4},
        },
    ),
}

_PLANE, _VOLUME = "x: batch 1 height width", "x: batch 1 depth height width"
_FLAT = {"height": 32, "width": 48}
_SOLID = {"depth": 16, "height": 16, "width": 24}


def _net(name: str, inputs: str = _PLANE, sizes: Mapping[str, int] = _FLAT, **settings: Any) -> Small:
    return Small(f"monai.networks.nets:{name}", inputs, settings, sizes)


_CHANNELS: dict[str, Any] = {"in_channels": 1, "out_channels": 2, "channels": (4, 8, 16), "strides": (2, 2)}
_LEVELS: dict[str, Any] = {
    "num_res_blocks": (1, 1),
    "channels": (8, 16),
    "attention_levels": (False, True),
    "norm_num_groups": 4,
}
#: A sampling that returns the mean, as in the models' own ``reconstruct``: random numbers can't be compared.
_MEAN = {"sampling": lambda z_mu, z_sigma: z_mu}
#: monai's networks for planes, and for volumes where they differ.
MONAI: Mapping[str, Small] = {
    "AHNet": _net(
        "AHNet",
        layers=(1, 1, 1, 1),
        spatial_dims=2,
        upsample_mode="bilinear",
        psp_block_num=0,
        sizes={"height": 32, "width": 64},
    ),
    "AttentionUnet": _net(
        "AttentionUnet", "x: batch 1 8*height 8*width", {"height": 4, "width": 6}, spatial_dims=2, **_CHANNELS
    ),
    "AutoEncoder": _net("AutoEncoder", spatial_dims=2, **{**_CHANNELS, "strides": (2, 2, 1)}),
    "AutoencoderKL": _net("AutoencoderKL", spatial_dims=2, latent_channels=3, **_LEVELS)._replace(attributes=_MEAN),
    "BasicUNet": _net("BasicUNet", spatial_dims=2, features=(4, 4, 8, 8, 16, 4)),
    "BasicUNet volumes": _net(
        "BasicUNet", _VOLUME, {key: 2 * size for key, size in _SOLID.items()}, features=(4, 4, 8, 8, 16, 4)
    ),
    "BasicUNetPlusPlus": _net("BasicUNetPlusPlus", spatial_dims=2, features=(4, 4, 8, 8, 16, 4)),
    "Classifier": _net(
        "Classifier", "x: batch 1 32 48", in_shape=(1, 32, 48), classes=3, channels=(4, 8), strides=(2, 2)
    ),
    "ControlNet": _net(
        "ControlNet",
        "x: batch 1 height width; timesteps: batch < 1000; controlnet_cond: batch 1 height width",
        spatial_dims=2,
        in_channels=1,
        num_head_channels=4,
        conditioning_embedding_in_channels=1,
        conditioning_embedding_num_channels=(8,),
        **_LEVELS,
    ),
    "Critic": _net("Critic", "x: batch 1 32 48", in_shape=(1, 32, 48), channels=(4, 8), strides=(2, 2)),
    "DAF3D": _net("DAF3D", "x: batch 1 32 32 32", in_channels=1, out_channels=1),
    "DecoderOnlyTransformer": _net(
        "DecoderOnlyTransformer",
        "x: batch length < 99; context: batch text 32",
        num_tokens=99,
        max_seq_len=40,
        attn_layers_dim=32,
        attn_layers_depth=2,
        attn_layers_heads=4,
        with_cross_attention=True,
    ),
    "DenseNet": _net(
        "DenseNet", spatial_dims=2, in_channels=1, out_channels=3, init_features=8, growth_rate=4, block_config=(2, 2)
    ),
    "DiffusionModelUNet": _net(
        "DiffusionModelUNet",
        "x: batch 1 height width; timesteps: batch < 1000; context: batch text 16",
        spatial_dims=2,
        in_channels=1,
        out_channels=1,
        num_head_channels=4,
        with_conditioning=True,
        cross_attention_dim=16,
        **_LEVELS,
    ),
    "Discriminator": _net("Discriminator", "x: batch 1 32 48", in_shape=(1, 32, 48), channels=(4, 8), strides=(2, 2)),
    "DynUNet": _net(
        "DynUNet",
        spatial_dims=2,
        in_channels=1,
        out_channels=2,
        kernel_size=[3, 3, 3],
        strides=[1, 2, 2],
        upsample_kernel_size=[2, 2],
        filters=[4, 8, 16],
    ),
    "EfficientNetBN": _net(
        "EfficientNetBN",
        "inputs: batch 3 height width",
        {"height": 64, "width": 64},
        model_name="efficientnet-b0",
        pretrained=False,
    ),
    "FlexibleUNet": _net(
        "FlexibleUNet",
        "inputs: batch 3 height width",
        {"height": 64, "width": 96},
        in_channels=3,
        out_channels=2,
        backbone="efficientnet-b0",
    ),
    "FullyConnectedNet": _net(
        "FullyConnectedNet", "input: batch 12", in_channels=12, out_channels=3, hidden_channels=(8, 8)
    ),
    "Generator": _net(
        "Generator", "x: batch 6", latent_shape=(6,), start_shape=(8, 4, 4), channels=(8, 4), strides=(2, 2)
    ),
    "GlobalNet": _net(
        "GlobalNet",
        "x: batch 1 32 48",
        image_size=[32, 48],
        spatial_dims=2,
        in_channels=1,
        num_channel_initial=4,
        depth=2,
    ),
    "HighResNet": _net("HighResNet", spatial_dims=2),
    "HoVerNet": _net("HoVerNet", "x: batch 3 256 256", out_classes=3),
    "LocalNet": _net("LocalNet", spatial_dims=2, in_channels=1, num_channel_initial=4, extract_levels=(0, 1)),
    "MILModel": _net(
        "MILModel", "x: batch 4 3 64 64", num_classes=2, mil_mode="att", pretrained=False, backbone="resnet18"
    ),
    "MedNeXt": _net(
        "MedNeXt",
        spatial_dims=2,
        init_filters=4,
        kernel_size=3,
        blocks_down=(1, 1),
        blocks_up=(1, 1),
        blocks_bottleneck=1,
    ),
    "MultiScalePatchDiscriminator": _net(
        "MultiScalePatchDiscriminator",
        "i: batch 1 height width",
        {"height": 128, "width": 128},
        num_d=2,
        num_layers_d=1,
        spatial_dims=2,
        channels=4,
        in_channels=1,
        minimum_size_im=64,
    ),
    "PatchDiscriminator": _net("PatchDiscriminator", spatial_dims=2, channels=4, in_channels=1, num_layers_d=2),
    "Quicknat": _net("Quicknat", "input: batch 1 height width", num_classes=3, num_filters=4),
    "RegUNet": _net("RegUNet", spatial_dims=2, in_channels=1, num_channel_initial=4, depth=2),
    "Regressor": _net(
        "Regressor", "x: batch 1 32 48", in_shape=(1, 32, 48), out_shape=(2,), channels=(4, 8), strides=(2, 2)
    ),
    "ResNet": _net("resnet10", spatial_dims=2, n_input_channels=1, num_classes=3),
    "ResNet volumes": _net("resnet10", _VOLUME, _SOLID, n_input_channels=1, num_classes=3),
    "SEResNet50": _net("SEResNet50", spatial_dims=2, in_channels=1, num_classes=3, layers=(1, 1, 1, 1)),
    "SPADEAutoencoderKL": _net(
        "SPADEAutoencoderKL",
        "x: batch 1 height width; seg: batch 3 height width",
        spatial_dims=2,
        label_nc=3,
        spade_intermediate_channels=8,
        **_LEVELS,
    )._replace(attributes=_MEAN),
    "SPADEDiffusionModelUNet": _net(
        "SPADEDiffusionModelUNet",
        "x: batch 1 height width; timesteps: batch < 1000; seg: batch 3 height width",
        spatial_dims=2,
        in_channels=1,
        out_channels=1,
        label_nc=3,
        num_head_channels=4,
        spade_intermediate_channels=8,
        **_LEVELS,
    ),
    "SPADENet": _net(
        "SPADENet",
        "seg: batch 3 32 48",
        spatial_dims=2,
        in_channels=1,
        out_channels=1,
        label_nc=3,
        input_shape=[32, 48],
        channels=[8, 4],
        is_vae=False,
        spade_intermediate_channels=8,
    ),
    "SegResNet": _net("SegResNet", spatial_dims=2, blocks_down=(1, 1, 1), blocks_up=(1, 1)),
    "SegResNet volumes": _net("SegResNet", _VOLUME, _SOLID, blocks_down=(1, 1, 1), blocks_up=(1, 1)),
    "SegResNetDS": _net("SegResNetDS", spatial_dims=2, init_filters=8, blocks_down=(1, 1, 1)),
    "SegResNetVAE": _net(
        "SegResNetVAE",
        "x: batch 1 32 48",
        input_image_size=[32, 48],
        spatial_dims=2,
        blocks_down=(1, 1, 1),
        blocks_up=(1, 1),
    ),
    "SwinUNETR": _net(
        "SwinUNETR",
        "x_in: batch 1 height width",
        {"height": 64, "width": 96},
        in_channels=1,
        out_channels=2,
        feature_size=12,
        spatial_dims=2,
    ),
    "SwinUNETR volumes": _net("SwinUNETR", "x_in: batch 1 64 64 64", in_channels=1, out_channels=2, feature_size=12),
    "TorchVisionFCModel": _net(
        "TorchVisionFCModel", "x: batch 3 64 64", model_name="resnet18", num_classes=2, pool=None, use_conv=False
    ),
    "UNETR": _net(
        "UNETR",
        "x_in: batch 1 32 32",
        in_channels=1,
        out_channels=2,
        img_size=(32, 32),
        feature_size=4,
        hidden_size=32,
        mlp_dim=48,
        num_heads=4,
        spatial_dims=2,
    ),
    "UNet": _net("UNet", spatial_dims=2, **_CHANNELS),
    "UNet volumes": _net("UNet", _VOLUME, _SOLID, spatial_dims=3, num_res_units=1, **_CHANNELS),
    "VNet": _net("VNet", spatial_dims=2),
    "VQVAE": _net(
        "VQVAE",
        "images: batch 1 height width",
        spatial_dims=2,
        in_channels=1,
        out_channels=1,
        channels=(8, 8),
        num_res_layers=1,
        num_res_channels=(8, 8),
        downsample_parameters=((2, 4, 1, 1),) * 2,
        upsample_parameters=((2, 4, 1, 1, 0),) * 2,
        embedding_dim=8,
    ),
    "VarFullyConnectedNet": _net(
        "VarFullyConnectedNet",
        "x: batch 12",
        in_channels=12,
        out_channels=3,
        latent_size=4,
        encode_channels=(8,),
        decode_channels=(8,),
        use_mean_at_inference=True,
    ),
    "ViT": _net(
        "ViT",
        "x: batch 1 32 32",
        in_channels=1,
        img_size=(32, 32),
        patch_size=(16, 16),
        hidden_size=32,
        mlp_dim=48,
        num_layers=2,
        num_heads=4,
        spatial_dims=2,
    ),
    "ViTAutoEnc": _net(
        "ViTAutoEnc",
        "x: batch 1 32 32",
        in_channels=1,
        img_size=(32, 32),
        patch_size=(16, 16),
        hidden_size=32,
        mlp_dim=48,
        num_layers=2,
        num_heads=4,
        spatial_dims=2,
    ),
    "VoxelMorph": _net(
        "VoxelMorph",
        "moving: batch 1 depth height width; fixed: batch 1 depth height width",
        {"depth": 16, "height": 16, "width": 32},
    ),
    "VoxelMorphUNet": _net(
        "VoxelMorphUNet",
        "concatenated_pairs: batch 2 height width",
        spatial_dims=2,
        in_channels=2,
        unet_out_channels=4,
        channels=(4, 4, 4, 4),
        final_conv_channels=(4,),
    ),
}

_COLOURS = """
BgrToGrayscale BgrToRgb HlsToRgb HsvToRgb LabToRgb LinearRgbToRgb LuvToRgb NormalsToRgb255 Rgb255ToNormals Rgb255ToRgb RgbToBgr
RgbToGrayscale RgbToHls RgbToHsv RgbToLab RgbToLinearRgb RgbToLuv RgbToRgb255 RgbToXyz RgbToYcbcr XyzToRgb YcbcrToRgb
"""
_PICTURE = "batch 3 height width image"
_NET = {"pretrained": False}


def _kornia(
    target: str, inputs: str = f"input: {_PICTURE}", sizes: Mapping[str, int] = {}, **settings: Any
) -> tuple[str, Small]:
    module, _, name = target.rpartition(".")
    return name, Small(f"kornia.{module}:{name}", inputs, settings, sizes)


#: kornia's modules: colours, filters, detectors and descriptors of features, geometry, models.
KORNIA: Mapping[str, Small] = dict(
    [
        *(_kornia(f"color.{name}", f"image: {_PICTURE}") for name in _COLOURS.split()),
        _kornia("color.GrayscaleToRgb", "image: batch 1 height width image"),
        _kornia("color.RgbToRgba", f"image: {_PICTURE}", alpha_val=0.5),
        _kornia("color.RgbaToRgb", "image: batch 4 height width image"),
        _kornia("color.Sepia"),
        _kornia("color.RgbToYuv"),
        _kornia("color.YuvToRgb"),
        _kornia("color.RgbToYuv420", f"yuvinput: {_PICTURE}"),
        _kornia("color.Yuv420ToRgb", "inputy: batch 1 2*height 2*width image; inputuv: batch 2 height width image"),
        _kornia("enhance.AdjustSaturation", saturation_factor=1.5),
        _kornia("enhance.AdjustHue", hue_factor=0.2),
        _kornia("enhance.AdjustGamma", gamma=1.5),
        _kornia("enhance.AdjustContrast", contrast_factor=0.5),
        _kornia("enhance.AdjustContrastWithMeanSubtraction", contrast_factor=0.5),
        _kornia("enhance.AdjustBrightness", brightness_factor=0.2),
        _kornia("enhance.AdjustSigmoid", f"image: {_PICTURE}"),
        _kornia("enhance.AdjustLog", f"image: {_PICTURE}"),
        _kornia("enhance.Invert"),
        _kornia("enhance.IntegralImage"),
        _kornia("enhance.Normalize", mean=0.5, std=0.3),
        _kornia("enhance.Denormalize", mean=0.5, std=0.3),
        _kornia(
            "enhance.JPEGCodecDifferentiable",
            f"image_rgb: {_PICTURE}; jpeg_quality: batch image",
            {"height": 32, "width": 48},
        ),
        _kornia("filters.BilateralBlur", kernel_size=(3, 3), sigma_color=0.1, sigma_space=(1.5, 1.5)),
        _kornia(
            "filters.JointBilateralBlur",
            f"input: {_PICTURE}; guidance: {_PICTURE}",
            kernel_size=(3, 3),
            sigma_color=0.1,
            sigma_space=(1.5, 1.5),
        ),
        _kornia("filters.BoxBlur", kernel_size=(3, 3)),
        _kornia("filters.BlurPool2D", kernel_size=3),
        _kornia("filters.MaxBlurPool2D", kernel_size=3),
        _kornia("filters.EdgeAwareBlurPool2D", kernel_size=3),
        _kornia("filters.Canny", hysteresis=False),
        _kornia("filters.GaussianBlur2d", kernel_size=(3, 3), sigma=(1.5, 1.5)),
        _kornia("filters.GuidedBlur", f"guidance: {_PICTURE}; input: {_PICTURE}", kernel_size=3, eps=0.1),
        _kornia("filters.InRange", lower=(0.2, 0.2, 0.2), upper=(0.7, 0.8, 0.9), return_mask=True),
        _kornia("filters.Laplacian", kernel_size=5),
        _kornia("filters.MedianBlur", kernel_size=(3, 3)),
        _kornia("filters.MotionBlur", f"x: {_PICTURE}", kernel_size=5, angle=35.0, direction=0.5),
        _kornia("filters.Sobel"),
        _kornia("filters.SpatialGradient"),
        _kornia("filters.SpatialGradient3d", "input: batch 1 depth height width image"),
        _kornia("filters.UnsharpMask", kernel_size=(3, 3), sigma=(1.5, 1.5)),
        _kornia("contrib.DistanceTransform", "image: batch 1 height width image"),
        _kornia("contrib.ExtractTensorPatches", window_size=4, stride=4, sizes={"height": 16, "width": 24}),
        *(
            _kornia(f"feature.{name}", "input: batch 1 32 32 image", **_NET)
            for name in ("HardNet", "HardNet8", "SOSNet", "TFeat")
        ),
        _kornia("feature.HyNet", "x: batch 1 32 32 image", **_NET),
        _kornia("feature.KeyNet", "x: batch 1 height width image", {"height": 32, "width": 48}, **_NET),
        _kornia("feature.OriNet", "patch: batch 1 32 32 image", **_NET),
        _kornia("feature.PatchDominantGradientOrientation", "patch: batch 1 32 32 image"),
        _kornia("feature.PatchAffineShapeEstimator", "patch: batch 1 19 19 image"),
        _kornia("feature.MKDDescriptor", "patches: batch 1 32 32 image", whitening=None),
        _kornia("feature.SIFTDescriptor", "input: batch 1 41 41 image"),
        _kornia("feature.DenseSIFTDescriptor", "input: batch 1 height width image", {"height": 32, "width": 48}),
        _kornia("feature.BlobHessian", "input: batch 1 height width image"),
        _kornia("feature.CornerHarris", "input: batch 1 height width image", k=0.04),
        _kornia("feature.CornerGFTT", "input: batch 1 height width image"),
        _kornia("feature.BlobDoGSingle", "input: batch 1 height width image"),
        _kornia("feature.DescriptorMatcher", "desc1: length 16; desc2: 2*text 16", match_mode="snn", th=0.9),
        _kornia("feature.DeFMO", "input_data: batch 6 32 32 image", **_NET),
        _kornia("feature.XFeatModel", "x: batch 1 height width image", {"height": 64, "width": 96}),
        # A list of lines for each image: the batch is static. The network takes 64 pixels at least, multiples of 8.
        _kornia("feature.sold2.SOLD2_detector", "img: 1 1 8*height 8*width image", {"height": 8, "width": 9}, **_NET),
        _kornia("geometry.subpix.NonMaximaSuppression2d", "x: batch 1 height width", kernel_size=(3, 3)),
        _kornia("geometry.subpix.ConvSoftArgmax2d", "x: batch 1 height width"),
        _kornia("geometry.subpix.ConvSoftArgmax3d", "x: batch 1 depth height width"),
        _kornia("geometry.subpix.SpatialSoftArgmax2d", "input: batch 3 height width"),
        _kornia("geometry.subpix.ConvQuadInterp3d", "x: batch 1 depth height width"),
        _kornia("geometry.transform.Resize", size=(9, 17)),
        _kornia("geometry.transform.Rescale", factor=1.5),
        _kornia("geometry.transform.CenterCrop2D", size=(8, 8)),
        *(_kornia(f"geometry.transform.{name}") for name in ("Hflip", "Vflip", "Rot180", "PyrDown", "PyrUp")),
        _kornia("geometry.transform.ScalePyramid", "x: batch 1 32 48 image"),
        _kornia(
            "geometry.transform.HomographyWarper",
            "patch_src: batch 3 height width image; src_homo_dst: batch 3 3",
            height=8,
            width=12,
        ),
        _kornia("models.dexined.DexiNed", f"x: {_PICTURE}", {"height": 32, "width": 48}, **_NET),
        _kornia(
            "models.rrdbnet.RRDBNet",
            f"x: {_PICTURE}",
            num_in_ch=3,
            num_out_ch=3,
            scale=2,
            num_feat=8,
            num_block=1,
            num_grow_ch=4,
        ),
        _kornia("models.small_sr.SmallSRNet", "x: batch 1 height width image", upscale_factor=3, **_NET),
        _kornia(
            "models.tiny_vit.TinyViT",
            "x: batch 3 64 64",
            img_size=64,
            num_classes=9,
            embed_dims=(16, 32, 32, 32),
            depths=(1, 1, 1, 1),
            num_heads=(2, 2, 2, 2),
            window_sizes=(2, 2, 2, 2),
        ),
        _kornia(
            "models.vit.VisionTransformer",
            "x: batch 3 32 32",
            image_size=32,
            patch_size=8,
            embed_dim=32,
            depth=2,
            num_heads=4,
        ),
        _kornia("models.vit_mobile.MobileViT", "x: batch 3 64 64"),
        _kornia("models.yunet.YuNet", "x: batch 3 64 96 image", phase="test", **_NET),
        _kornia(
            "models.sam.architecture.image_encoder.ImageEncoderViT",
            "x: batch 3 64 64",
            img_size=64,
            patch_size=8,
            embed_dim=32,
            depth=2,
            num_heads=4,
            out_chans=16,
            use_rel_pos=True,
            window_size=4,
            global_attn_indexes=(1,),
        ),
    ]
)

#: The attributes that ultralytics' exporter sets in heads and blocks.
_EXPORTED = {"export": True, "dynamic": True, "format": "onnx"}
_CONFIGURATIONS = {
    "DetectionModel": "yolov3-tiny yolov5n yolov6n yolov8n yolov8n-ghost yolov8n-p2 yolov8n-p6 yolov9t yolov10n yolo11n yolo12n yolo26n",
    "SegmentationModel": "yolov8n-seg yolo11n-seg yolo12n-seg yolo26n-seg",
    "PoseModel": "yolov8n-pose yolo11n-pose yolo12n-pose yolo26n-pose",
    "OBBModel": "yolov8n-obb yolo11n-obb yolo12n-obb yolo26n-obb",
    "ClassificationModel": "yolov8n-cls yolo11n-cls yolo12n-cls yolo26n-cls",
    "SemanticSegmentationModel": "yolo26n-sem",
    "DepthModel": "yolo26n-depth",
    "RTDETRDetectionModel": "rtdetr-resnet50 yolov8n-rtdetr",
    "WorldModel": "yolov8n-worldv2",
}
#: ultralytics' configurations, as its exporter sets them up.
ULTRALYTICS: Mapping[str, Small] = {
    name: Small(
        f"ultralytics.nn.tasks:{model}",
        "x: batch 3 32*height 32*width image" if "rtdetr" in name else "x: batch 3 height width image",
        {"cfg": f"{name}.yaml", "verbose": False},
        {"height": 2, "width": 4} if "rtdetr" in name else {"height": 64, "width": 128},
        attributes={**_EXPORTED, "num_queries": 20},
    )
    for model, names in _CONFIGURATIONS.items()
    for name in names.split()
}
