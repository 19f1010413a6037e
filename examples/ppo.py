"""Learns to balance gymnasium's CartPole with PPO; each rank plays in environments of its own.

    pip install gymnasium
    paceline run -n 2 examples/ppo.py
    torchrun --nproc-per-node 2 examples/ppo.py

What differs from the script for torch's DDP:

    - from torch.nn.parallel import DistributedDataParallel as DDP
    + from paceline.torch import DistributedDataParallel as DDP
"""

import argparse

import gymnasium as gym
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributions import Categorical

from paceline.torch import DistributedDataParallel as DDP

ENVS, GAMMA, LAMBDA, CLIP = 4, 0.99, 0.95, 0.2


def mlp(inputs, width, outputs):
    hidden = [nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()]
    return nn.Sequential(*hidden, nn.Linear(width, outputs))


class Agent(nn.Module):
    def __init__(self, observations, actions, width=64):
        super().__init__()
        self.actor = mlp(observations, width, actions)
        self.critic = mlp(observations, width, 1)

    def forward(self, observation):
        return self.actor(observation), self.critic(observation).squeeze(-1)


@torch.no_grad()
def play(agent, envs, observation, length):
    """Play `length` steps; return the batch with its advantages, and the next observation."""
    steps = []
    for _ in range(length):
        logits, value = agent(observation)
        policy = Categorical(logits=logits)
        action = policy.sample()
        log_prob = policy.log_prob(action)
        after, reward, terminated, truncated, _ = envs.step(action.numpy())
        reward = torch.tensor(reward, dtype=torch.float32)
        ongoing = torch.tensor(~(terminated | truncated), dtype=torch.float32)
        steps.append((observation, action, log_prob, value, reward, ongoing))
        observation = torch.tensor(after)
    columns = [torch.stack(column) for column in zip(*steps)]
    observations, actions, log_probs, values, rewards, ongoing = columns

    # Generalised advantage estimation, from the last step backwards.
    advantages = torch.zeros_like(rewards)
    advantage, next_value = 0.0, agent(observation)[1]
    for t in reversed(range(length)):
        error = rewards[t] + GAMMA * next_value * ongoing[t] - values[t]
        advantage = error + GAMMA * LAMBDA * ongoing[t] * advantage
        advantages[t], next_value = advantage, values[t]
    batch = (observations, actions, log_probs, advantages, advantages + values)
    return [part.flatten(0, 1) for part in batch], observation


def ppo_loss(agent, observations, actions, old_log_probs, advantages, returns):
    logits, values = agent(observations)
    policy = Categorical(logits=logits)
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    ratio = (policy.log_prob(actions) - old_log_probs).exp()
    policy_loss = -torch.min(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages).mean()
    value_loss = (values - returns).square().mean()
    return policy_loss + 0.5 * value_loss - 0.01 * policy.entropy().mean()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument("--length", type=int, default=128, help="steps of each environment per iteration")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    same_step = {"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP}
    envs = gym.make_vec("CartPole-v1", num_envs=ENVS, vectorization_mode="sync", vector_kwargs=same_step)
    envs = gym.wrappers.vector.RecordEpisodeStatistics(envs, buffer_length=20)
    torch.manual_seed(0)
    agent = DDP(Agent(envs.single_observation_space.shape[0], envs.single_action_space.n))
    optimizer = torch.optim.Adam(agent.parameters(), lr=1e-3)
    torch.manual_seed(rank)  # each rank plays its own games
    observation = torch.tensor(envs.reset(seed=rank * ENVS)[0])

    for iteration in range(args.iterations):
        batch, observation = play(agent, envs, observation, args.length)
        for _ in range(4):
            for part in torch.randperm(len(batch[0])).chunk(4):
                loss = ppo_loss(agent, *(tensor[part] for tensor in batch))
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()
        score = torch.tensor(np.mean(envs.return_queue))
        dist.all_reduce(score)
        if rank == 0 and iteration % 5 == 4:
            print(f"iteration {iteration + 1}  mean return {score.item() / world_size:.1f}", flush=True)
    envs.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
