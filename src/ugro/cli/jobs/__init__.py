"""Commands about jobs: submit, show, logs, wait, cancel."""
