"""Starts the agent in this process: ``python -m ugro.agent``. Clients start it by themselves."""

from ugro.agent.main import main

main()
