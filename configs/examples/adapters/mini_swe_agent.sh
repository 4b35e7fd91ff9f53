#!/bin/sh
# mini_swe_agent.sh TASK ANSWER: let mini-swe-agent do a task in this directory, and reward the right answer.txt.
mini --model openai/policy --task "$1" --yolo --exit-immediately --output trajectory.json > mini.log
reward=0
[ "$(cat answer.txt 2> /dev/null)" = "$2" ] && reward=1
echo "$reward" > reward.txt
