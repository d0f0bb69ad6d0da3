"""`snapmla audit`: what FP8 costs a model, layer by layer, from captured activations."""
