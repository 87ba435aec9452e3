"""One small model of each of timm's families and of torchvision's, with example inputs.

A family is a module of the library.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from tests.support.vision import define_vision_schemas
from tests.support.vision_kernels import define_vision_kernels
from tests.support.zoo import stirred


class Small(NamedTuple):
    """A small model of a family.

    Attributes:
        model: The name that the library's ``create_model`` or ``get_model`` takes.
        size: Height and width of the images in pixels; 0 stands for the size that the model was made for.
        settings: Further settings of the model, where no model of the family is small.
    """

    model: str
    size: int = 0
    settings: Mapping[str, Any] = {}


_SMALL_VIT = {"depth": 2, "embed_dim": 64, "num_heads": 4}
#: The families of timm whose smallest model takes the size it was made for.
_AS_MADE = """
beit=beit_base_patch16_224 byoanet=halonet_h1 cait=cait_xxs24_224 coat=coat_tiny convit=convit_tiny crossvit=crossvit_tiny_240
deit=deit_tiny_distilled_patch16_224 efficientformer=efficientformer_l1 efficientformer_v2=efficientformerv2_s0
eva=eva02_tiny_patch14_224 gcvit=gcvit_xxtiny hiera=hiera_tiny_224 levit=levit_128s
maxxvit=test_maxvit mlp_mixer=gmlp_ti16_224 mvitv2=mvitv2_tiny nest=nest_tiny pit=pit_ti_distilled_224 sequencer=sequencer2d_s
swiftformer=swiftformer_xs swin_transformer=swin_tiny_patch4_window7_224 swin_transformer_v2=swinv2_tiny_window8_256
swin_transformer_v2_cr=swinv2_cr_tiny_224 tiny_vit=tiny_vit_5m_224 tnt=tnt_s_patch16_224 twins=twins_svt_small visformer=visformer_tiny
vision_transformer=test_vit vision_transformer_hybrid=vit_tiny_r_s16_p8_224 vision_transformer_relpos=test_vit_relpos
vitamin=vitamin_small_224 volo=volo_d1_224 xcit=xcit_nano_12_p8_224
"""
#: The families of timm whose smallest model takes images of any size.
_OF_ANY_SIZE = """
byobnet=test_byobnet convmixer=convmixer_768_32 convnext=test_convnext cpubone=cpubone_nano csatv2=csatv2 cspnet=cs3darknet_focus_s
cspnext=cspnext_tiny davit=davit_tiny densenet=densenet121 dla=dla46x_c dpn=dpn48b edgenext=edgenext_xx_small
efficientnet=test_efficientnet efficientvim=efficientvim_m1 efficientvit_mit=efficientvit_b0 fasternet=fasternet_t0
fastvit=fastvit_t8 focalnet=focalnet_tiny_srf ghostnet=ghostnet_050 hardcorenas=hardcorenas_b hgnet=hgnetv2_b0 hrnet=hrnet_w18_small
iformer=iformer_t inception_next=inception_next_atto inception_resnet_v2=inception_resnet_v2 inception_v3=inception_v3
inception_v4=inception_v4 lcnetv2=lcnetv2_small lowformer=lowformer_b0 mambaout=test_mambaout metaformer=poolformerv2_s12
mobilenetv3=mobilenetv3_small_050 mobilenetv5=mobilenetv5_base mobilevit=mobilevit_xxs nasnet=nasnetalarge nextvit=nextvit_small
nfnet=test_nfnet pnasnet=pnasnet5large pvt_v2=pvt_v2_b0 rdnet=rdnet_tiny regnet=regnetx_002 repghost=repghostnet_050 repvit=repvit_m1
res2net=res2next50 resnest=resnest14d resnet=test_resnet resnetv2=resnetv2_18 rexnet=rexnet_100 selecsls=selecsls42
senet=legacy_seresnet18 shvit=shvit_s1 sknet=skresnet18 starnet=starnet_s050 tresnet=tresnet_m vgg=vgg11 vovnet=ese_vovnet19b_slim_dw
xception=xception xception_aligned=xception41p
"""


def _pairs(text: str) -> dict[str, str]:
    return dict(pair.split("=") for pair in text.split())


#: timm's families.
TIMM: Mapping[str, Small] = {
    **{family: Small(model) for family, model in _pairs(_AS_MADE).items()},
    **{family: Small(model, 128) for family, model in _pairs(_OF_ANY_SIZE).items()},
    "deepseek_vit": Small("deepseek_vit_412m", 56, _SMALL_VIT),
    "efficientvit_msra": Small(
        "efficientvit_m0", 256
    ),  # at the model's own size, of whole windows, it takes a branch of its own
    "gemma4_vit": Small("gemma4_vit_167m", 96, _SMALL_VIT),
    "hieradet_sam2": Small("sam2_hiera_tiny", 224),
    "naflexvit": Small("naflexvit_base_patch16_gap", 96, _SMALL_VIT),
    "qwen3_vit": Small("qwen3_vit_88m", 96, _SMALL_VIT),
    "vision_transformer_sam": Small("samvit_base_patch16_224", 224, _SMALL_VIT),
}

_RCNN = {
    "min_size": 96,
    "max_size": 128,
    "rpn_pre_nms_top_n_test": 30,
    "rpn_post_nms_top_n_test": 12,
    "box_detections_per_img": 8,
}
_ONE_STAGE = {"topk_candidates": 20, "detections_per_img": 3}
#: torchvision's families, by the modules below ``torchvision.models``.
TORCHVISION: Mapping[str, Small] = {
    **{
        family: Small(model, 128)
        for family, model in _pairs(
            """
            alexnet=alexnet convnext=convnext_tiny densenet=densenet121 efficientnet=efficientnet_b0 googlenet=googlenet
            inception=inception_v3 mnasnet=mnasnet0_5 mobilenetv2=mobilenet_v2 mobilenetv3=mobilenet_v3_small
            regnet=regnet_x_400mf resnet=resnet18 shufflenetv2=shufflenet_v2_x0_5 squeezenet=squeezenet1_1
            swin_transformer=swin_v2_t vgg=vgg11 segmentation.deeplabv3=deeplabv3_mobilenet_v3_large segmentation.fcn=fcn_resnet50
            segmentation.lraspp=lraspp_mobilenet_v3_large optical_flow.raft=raft_small
            quantization.googlenet=quantized_googlenet quantization.inception=quantized_inception_v3
            quantization.mobilenetv2=quantized_mobilenet_v2 quantization.mobilenetv3=quantized_mobilenet_v3_large
            quantization.resnet=quantized_resnet18 quantization.shufflenetv2=quantized_shufflenet_v2_x0_5
            video.resnet=r3d_18 video.swin_transformer=swin3d_t
            """
        ).items()
    },
    "maxvit": Small("maxvit_t", 224),
    "vision_transformer": Small("vit_b_32", 224),
    "video.mvit": Small("mvit_v2_s", 64),
    "video.s3d": Small("s3d", 224),
    "detection.faster_rcnn": Small("fasterrcnn_mobilenet_v3_large_320_fpn", 128, _RCNN),
    "detection.keypoint_rcnn": Small("keypointrcnn_resnet50_fpn", 128, _RCNN),
    "detection.mask_rcnn": Small("maskrcnn_resnet50_fpn", 128, _RCNN),
    "detection.fcos": Small("fcos_resnet50_fpn", 128, {"min_size": 96, "max_size": 128, **_ONE_STAGE}),
    "detection.retinanet": Small("retinanet_resnet50_fpn", 128, {"min_size": 96, "max_size": 128, **_ONE_STAGE}),
    "detection.ssd": Small("ssd300_vgg16", 128, _ONE_STAGE),
    "detection.ssdlite": Small("ssdlite320_mobilenet_v3_large", 128, _ONE_STAGE),
}


def timm_model(family: str) -> tuple[nn.Module, tuple[Any, ...]]:
    """The model of a family of timm, random weights, and a batch of two images."""
    define_vision_schemas()
    small = TIMM[family]
    torch.manual_seed(0)
    model = stirred(importlib.import_module("timm").create_model(small.model, **small.settings).eval())
    size = small.size or model.pretrained_cfg["input_size"][-1]
    return model, (torch.randn(2, 3, size, size),)


def torchvision_model(family: str) -> tuple[nn.Module, tuple[Any, ...]]:
    """A model of a torchvision family with random weights, and images: two, a list of one, two films or two pairs."""
    define_vision_kernels()
    small = TORCHVISION[family]
    settings: dict[str, Any] = {"weights": None, **small.settings}
    if family.startswith(("detection", "segmentation")):
        settings["weights_backbone"] = None
    if family.endswith(("googlenet", "inception")):
        settings["init_weights"] = False  # takes half a minute
    torch.manual_seed(0)
    models = importlib.import_module("torchvision.models")
    made = _small_mvit(small.size) if family == "video.mvit" else models.get_model(small.model, **settings)
    model = stirred(made.eval())
    if family.startswith("detection"):
        _spread(model, family)
    image = (3, small.size, small.size)
    if family.startswith("detection"):
        return model, ([torch.rand(image)],)
    if family.startswith("video"):
        return model, (torch.randn(2, 3, 16, small.size, small.size),)
    if family.startswith("optical_flow"):
        return model, (torch.rand(2, *image) * 2 - 1, torch.rand(2, *image) * 2 - 1)
    return model, (torch.randn(2, *image),)


def _small_mvit(size: int) -> nn.Module:
    """mvit_v2_s with 4 of its 16 blocks, for frames of another size: comparing the whole model takes minutes."""
    mvit: Any = importlib.import_module("torchvision.models.video.mvit")
    rows = ((1, 96, 96, [1, 1, 1], [1, 8, 8]), (2, 96, 192, [1, 2, 2], [1, 4, 4]))
    rows += ((4, 192, 384, [1, 2, 2], [1, 2, 2]), (8, 384, 768, [1, 2, 2], [1, 1, 1]))
    blocks = [
        mvit.MSBlockConfig(
            num_heads=heads,
            input_channels=before,
            output_channels=after,
            kernel_q=[3, 3, 3],
            kernel_kv=[3, 3, 3],
            stride_q=stride,
            stride_kv=stride_kv,
        )
        for heads, before, after, stride, stride_kv in rows
    ]
    made: nn.Module = mvit.MViT(
        (size, size),
        16,
        blocks,
        residual_pool=True,
        residual_with_cls_embed=False,
        rel_pos_embed=True,
        proj_after_attn=True,
    )
    return made


def _spread(model: Any, family: str) -> None:
    """Makes results independent of rounding: scores well apart, masks that are neither 0 nor 1."""
    with torch.no_grad():
        if family == "detection.mask_rcnn":
            model.roi_heads.mask_predictor.mask_fcn_logits.weight.mul_(0.03)
        elif family.startswith("detection.ssd"):  # the scores of a fresh model don't depend on the image
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0, 1.4 / parameter[0].numel() ** 0.5)
            for module in model.modules():
                if isinstance(module, nn.BatchNorm2d):
                    module.momentum = 1.0
            images = model.transform([torch.randn(3, 128, 128) for _ in range(4)])[0].tensors
            model.backbone.train()(images)
            model.eval()
            logits = model.head(list(model.backbone(images).values()))["cls_logits"]
            for name, parameter in model.head.classification_head.named_parameters():
                if name.endswith("weight") and parameter.dim() == 4 and parameter.shape[0] % 91 == 0:
                    parameter.mul_(6 / logits.abs().max())
