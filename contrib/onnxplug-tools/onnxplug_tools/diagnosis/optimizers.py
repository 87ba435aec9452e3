"""Names of ONNX Runtime's graph optimisers, as ``InferenceSession(disabled_optimizers=[…])`` takes them."""

#: The optimisers of versions 1.20 to 1.31; a name that a version does not know has no effect there.
OPTIMIZERS = tuple(
    """
    AttentionFusion Avx2WeightS8ToU8Transformer BiasDropoutFusion BiasGeluFusion BiasSkipLayerNormFusion BiasSoftmaxFusion
    CastChainElimination CastElimination CastFloat16Transformer ClipQuantRewrite CommonSubexpressionElimination ConstantFolding
    ConstantFoldingDQ ConstantSharing ConvActivationFusion ConvAddActivationFusion ConvAddFusion ConvBNFusion ConvMulFusion
    DQMatMulNBitsFusion DivMulFusion DoubleQDQPairsRemover DynamicQuantizeMatMulFusion EliminateDropout EliminateIdentity
    EliminateSlice EmbedLayerNormFusion EnsureUniqueDQForNodeUnit ExpandElimination FastGeluFusion
    FreeDimensionOverrideTransformer FuseFp16InitializerToFp32NodeTransformer GatherSliceToSplitFusion GatherToSliceFusion
    GeluFusionL1 GeluFusionL2 GemmActivationFusion GemmSumFusion GemmTransposeFusion GqaValueLayoutTransformer
    GroupQueryAttentionFusion GroupQueryAttentionPreNormFusion LabelEncoderFusion LayerNormFusionL1 LayerNormFusionL2
    MatMulActivationFusion MatMulAddFusion MatMulIntegerToFloatFusion
    MatMulNBitsFusion MatMulNBitsMlpFusion MatMulNBitsQkvFusion MatMulScaleFusion MatMul_BatchNormalization_Fusion
    MatmulTransposeFusion NchwcTransformer NhwcTransformer NoopElimination NotWhereFusion Pad_Fusion PreShapeNodeElimination
    QDQFinalCleanupTransformer QDQPropagationTransformer QDQS8ToU8Transformer QDQSelectorActionTransformer QuickGeluFusion
    ReluQuantRewrite RemoveDuplicateCastTransformer ReshapeFusion SimplifiedLayerNormFusion SkipLayerNormFusion
    SliceConcatToSpaceToDepthFusion TransposeOptimizer UnsqueezeElimination WeightBiasQuantization
    """.split()
)
