"""Commands about jobs: submit, show, wait, cancel, logs and files."""
