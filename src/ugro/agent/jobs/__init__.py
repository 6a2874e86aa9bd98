"""What users ask of jobs: submit, dry run, cancel, reuse a result, list what was made."""
