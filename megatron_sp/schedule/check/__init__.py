"""The dry run of a schedule: follows placements of tensors through the model, without ranks, and reports mistakes as errors."""
