"""Names of our entries in verl's `extra_fields`; needs nothing of verl, whose agent loop loads our agent loops."""

CALL_WEIGHTS = "response_weights"
"""Field with the weight of each response token, of rows with weights other than 1."""
GENERATED_TOKENS = "generated_tokens"
"""Field with the number of tokens that the model generated in the session."""
CREDIT = "credit"
"""Field with a session's report to credit estimators, of sessions that report something."""
